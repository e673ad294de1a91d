"""How much of a long recording is kept: by age, by size, or all of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrace import keeping
from kvtrace.store.retention import forget_before

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrace.store import Store

LEAST_NS = 1_200_000_000_000
"""What is younger than this is always kept: requests that are under way need it."""
_PAUSE_S = 60.0
_LEFT = 0.9  # a store that has become too large gives up a little more, so that it need not do so every minute


@dataclass(slots=True)
class Retention:
    """What is kept of a recording: the last `age_s` seconds, and no more than `size_bytes`; None sets no bound.

    The bound is on what the store holds. On disk the recorder has up to three such files: its own, the snapshot that is
    in place, and the one before.
    """

    age_s: float | None = None
    size_bytes: int | None = None
    forgotten_ns: int = 0
    dropped_requests: int = 0
    _next_s: float = 0.0

    def apply(self, store: Store) -> int:
        """Drop what is out of bounds, at most once a minute; return how many requests that was."""
        if (self.age_s is None and self.size_bytes is None) or time.monotonic() < self._next_s:
            return 0
        self._next_s = time.monotonic() + _PAUSE_S
        now_ns = time.time_ns()
        bounds = [self._by_age(now_ns), self._by_size(store)]
        before_ns = keeping.window_of(min(max(bounds), now_ns - LEAST_NS))
        first_ns = store.select("SELECT min(from_ns) FROM occurrence").values[0][0]
        if first_ns is None or before_ns <= first_ns:
            return 0
        with store.transaction():
            count = forget_before(store, before_ns)
            keeping.recount(store, before_ns)
            store.remember(_facts(before_ns, self.dropped_requests + count))  # it goes with what it counts
        self.forgotten_ns = before_ns
        self.dropped_requests += count
        return count

    def resume(self, known: Mapping[str, str]) -> None:
        """Count on from what the facts of an interrupted recording say."""
        counted = [known.get(name, "") for name in _facts(0, 0)]
        self.forgotten_ns, self.dropped_requests = (int(text) if text.isdecimal() else 0 for text in counted)

    def facts(self) -> dict[str, str]:
        """Return what the run's facts should say of it."""
        return _facts(self.forgotten_ns, self.dropped_requests) if self.forgotten_ns else {}

    def _by_age(self, now_ns: int) -> int:
        return 0 if self.age_s is None else now_ns - int(self.age_s * 1e9)

    def _by_size(self, store: Store) -> int:
        """Return before when the events lie that have to go so that the others fit, as if all took the same room."""
        if self.size_bytes is None or (used_bytes := store.used_bytes()) <= self.size_bytes:
            return 0
        kept = _LEFT * self.size_bytes / used_bytes
        sql = """
SELECT coalesce(min(from_ns), 9223372036854775807) FROM (
  SELECT from_ns, sum(sum(events)) OVER (ORDER BY from_ns DESC) AS since, sum(sum(events)) OVER () AS whole
  FROM occurrence GROUP BY from_ns
) WHERE since <= $kept * whole
"""
        return int(store.select(sql, {"kept": kept}).values[0][0])


def _facts(forgotten_ns: int, dropped_requests: int) -> dict[str, str]:
    """Return the run's facts: since when (unix ns) it has everything, and how many requests are gone."""
    return {"recorder.kept_from_ns": str(forgotten_ns), "recorder.dropped_requests": str(dropped_requests)}
