"""Lanes: what overlaps side by side, in as few rows as it takes; what is kept is bounded by what overlaps at once."""

from __future__ import annotations

import heapq


class Lanes:
    """Gives each stretch of time a lane in which nothing overlaps it. Stretches must come in order of their start."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []  # until when, lane
        self._free: list[int] = []
        self._count = 0

    def take(self, start_ns: int, end_ns: int) -> int:
        """Return the number of a lane, from 0, that is free from start to end."""
        while self._busy and self._busy[0][0] <= start_ns:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self._count = self._count, self._count + 1
        heapq.heappush(self._busy, (max(end_ns, start_ns + 1), lane))
        return lane
