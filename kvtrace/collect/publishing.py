"""When a snapshot is published again: as soon as publishing takes no more than its part of one processor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrace.store import Store

SHARE = 0.1
"""At most this part of one processor goes into publishing."""
_SAVED_S = 1.0
"""So much processor time may be saved up by snapshots that cost less, for one that costs more: DuckDB merges what was
appended little by little into ever larger groups of rows, so that a checkpoint in ten takes several times as long."""
_RETRY_S = 0.5
_LATE = 1.25
"""A snapshot older than so many intervals need not wait for the work before the next one."""


class Work(NamedTuple):
    """How long a piece of work took, s, and how much processor time."""

    took_s: float = 0.0
    spent_s: float = 0.0


NO_WORK = Work()


class Pace:
    """One place where snapshots are put, and when the next one is due."""

    def __init__(self, target: Path, interval_s: float) -> None:
        self.target = target
        self.cost_s = 0.0  # processor time of the last publication
        self.published_ns = 0
        self.is_refused = False  # the last time somebody read what would have been brought up to date
        self._interval_s = interval_s
        self._next_s = 0.0
        self._late_s = 0.0
        self._last_s = 0.0
        self._count = 0
        self._whole_cost_s = 0.0
        self._saved_s = 0.0  # processor time, as of the last publication

    @property
    def is_due(self) -> bool:
        """Whether it is time to publish."""
        return time.monotonic() >= self._next_s

    @property
    def is_late(self) -> bool:
        """Whether a snapshot should come before the work for the next one is done: that is long due, and paid for."""
        now_s = time.monotonic()
        return now_s >= self._late_s and self._count > 0 and self._saved(now_s) >= self.cost_s

    def _saved(self, now_s: float) -> float:
        """Return how much processor time is saved up by then, s."""
        return min(_SAVED_S, self._saved_s + SHARE * (now_s - self._last_s)) if self._count else 0.0

    def publish(self, store: Store, *, work: Work = NO_WORK, at_any_cost: bool = False) -> bool:
        """Publish; return False if that has to wait, since somebody still reads what would be brought up to date.

        `work` is what was done before it, and will be before the next one, for which it begins so much sooner. It gets
        half of a processor at most, refused or not, but for a backlog: to wait for longer than the interval would only
        add to it. While it had no processor it has rested already.

        A large store is copied whole only once enough time has gone by since the last publication to pay for it; but
        for the first two, which have to be whole whenever they are made.
        """
        begin_s, spent_s = time.monotonic(), time.process_time()
        is_paid = self._count < 2 or begin_s - self._last_s >= self._whole_cost_s * (1 / SHARE - 1)
        saved_s = self._saved(begin_s)
        extent = store.publish(self.target, whole=at_any_cost or is_paid)
        least_s = min(max(0.0, 2 * work.spent_s - work.took_s), self._interval_s)
        self.is_refused = extent is None
        if extent is None:
            self._next_s = time.monotonic() + max(_RETRY_S, least_s)
            return False
        self.cost_s = time.process_time() - spent_s
        self._last_s = time.monotonic()
        self._late_s = self._last_s + _LATE * self._interval_s
        self._count += 1
        self.published_ns = time.time_ns()
        if extent == "whole":  # paid for by the time before it, or one of the first two
            self._whole_cost_s, self._saved_s = self.cost_s, 0.0
        else:
            self._saved_s = saved_s - self.cost_s * (1 - SHARE)
        pause_s = max(self._interval_s, -self._saved_s / SHARE)
        self._next_s = self._last_s + max(pause_s - work.took_s, least_s)
        return True

    def pause(self, seconds: float) -> None:
        """Let at least so much time go by before the next publication."""
        self._next_s, self._late_s = (max(one, time.monotonic() + seconds) for one in (self._next_s, self._late_s))
