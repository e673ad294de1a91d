"""What a recording says of its events: how that is brought up to date, and the findings that are gathered from it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtrace import analyze
from kvtrace.collect.backlog import Backlog
from kvtrace.collect.conclusions import Conclusions
from kvtrace.collect.publishing import NO_WORK, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrace.collect.stats import Stats
    from kvtrace.store import Store

    Analysis = Callable[[Store, int | None, Callable[[], None]], analyze.Writing]


class Answers:
    """The answers of one recording; `backlog` is what they do not know, `work` what the last analysis took."""

    def __init__(self, analysis: Analysis | None, stats: Stats, notice: Callable[[str, str], None]) -> None:
        self.backlog = Backlog()
        self.conclusions = Conclusions(notice)
        self.work = NO_WORK
        self._analysis = analysis
        self._stats = stats
        self._notice = notice

    @property
    def is_analysis_due(self) -> bool:
        """Whether there are events that have not been analysed and are to be."""
        return self.backlog.since_ns is not None and self._analysis is not None

    def catch_up(self, store: Store, since_ns: int | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Bring the answers up to date; `meanwhile` may add events, which they then do not know.

        A failure is noted: events without answers are better than neither.
        """
        if self._analysis is None:
            return
        begin_s, spent_s = time.monotonic(), time.process_time()
        try:
            with self.backlog.under_way():
                write = self._analysis(store, since_ns, meanwhile)
                with store.transaction():
                    write()
                    self.backlog.settle(store)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the events must come out
            told = f"failed and is tried again with the next events: {type(error).__name__}: {error}"
            self._notice("analysis", told)
        else:
            self.conclusions.is_behind = True
        self._stats.requests = int(store.select("SELECT count(*) FROM request").values[0][0])
        self.work = Work(time.monotonic() - begin_s, time.process_time() - spent_s)
        self._stats.analyze_s = self.work.took_s

    def finish(self, store: Store) -> None:
        """Bring the answers up to date for the last time: all of them where events are few enough for that."""
        if self._stats.events <= analyze.WHOLE_ANALYSIS_EVENTS:
            self.catch_up(store, None)
        elif self.backlog.since_ns is not None:
            self.catch_up(store, self.backlog.since_ns)

    def conclude(self, store: Store) -> bool:
        """Write findings for the last time, when the run's facts say that it is complete; return whether there are."""
        if self._analysis is None:
            return False
        self.conclusions.finish(store)
        return True
