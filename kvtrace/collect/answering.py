"""What a recording says of its events: from when on that is owed, and how it is brought up to date."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtrace import analyze
from kvtrace.collect.conclusions import Conclusions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtrace.collect.stats import Stats
    from kvtrace.store import Store

    Analysis = Callable[[Store, int | None], int]

OWED = "recorder.unanalyzed_from_ns"
"""The run's fact that says since when committed events are not analysed, unix ns; none says that all are."""
RESUME_MARGIN_NS = 60_000_000_000


class Answers:
    """The answers of one recording, and the findings that are gathered from them.

    `owed_from_ns` is from when on events have not been analysed, unix ns; None if all have.
    """

    def __init__(self, analysis: Analysis | None, stats: Stats, notice: Callable[[str, str], None]) -> None:
        self.conclusions = Conclusions(notice)
        self.owed_from_ns: int | None = None
        self._analysis = analysis
        self._stats = stats
        self._notice = notice

    @property
    def is_analysis_due(self) -> bool:
        """Whether there are events that have not been analysed and are to be."""
        return self.owed_from_ns is not None and self._analysis is not None

    def resume(self, known: Mapping[str, str]) -> None:
        """Take over what an interrupted recording owed, by the run's facts."""
        self.owed_from_ns = _owed_from_ns(known)

    def facts(self) -> dict[str, str]:
        """Return what the run is to say of what is owed."""
        return {} if self.owed_from_ns is None else {OWED: str(self.owed_from_ns)}

    def remember(self, store: Store, oldest_ns: int) -> None:
        """Write into the caller's transaction that events from then on, unix ns, are owed; `owe` follows its commit."""
        if self.owed_from_ns is None or oldest_ns < self.owed_from_ns:
            store.remember({OWED: str(oldest_ns)})

    def owe(self, oldest_ns: int) -> None:
        """Note that events from then on, unix ns, are owed."""
        self.owed_from_ns = oldest_ns if self.owed_from_ns is None else min(self.owed_from_ns, oldest_ns)

    def catch_up(self, store: Store, since_ns: int | None) -> None:
        """Bring the answers up to date. A failure is noted: events without answers are better than neither."""
        if self._analysis is None:
            return
        begin_s = time.monotonic()
        try:
            with store.transaction():
                self._analysis(store, since_ns)
                store.execute("DELETE FROM run WHERE name = $owed", {"owed": OWED})
        except Exception as error:  # noqa: BLE001 -- whatever it is, the events must come out
            told = f"failed and is tried again with the next events: {type(error).__name__}: {error}"
            self._notice("analysis", told)
        else:
            self.owed_from_ns = None
            self.conclusions.is_behind = True
        self._stats.requests = int(store.select("SELECT count(*) FROM request").values[0][0])
        self._stats.analyze_s = time.monotonic() - begin_s

    def finish(self, store: Store) -> None:
        """Bring the answers up to date for the last time: all of them where events are few enough for that."""
        if self._stats.events <= analyze.WHOLE_ANALYSIS_EVENTS:
            self.catch_up(store, None)
        elif self.owed_from_ns is not None:
            self.catch_up(store, self.owed_from_ns)

    def conclude(self, store: Store) -> bool:
        """Write findings for the last time, when the run's facts say that it is complete; return whether there are."""
        if self._analysis is None:
            return False
        self.conclusions.finish(store)
        return True


def _owed_from_ns(known: Mapping[str, str]) -> int:
    """Return since when an interrupted recording's events have perhaps not been analysed, unix ns, by the run's facts.

    Those are what was committed after the last snapshot, or what was said to be owed: a backlog is older than that.
    """
    said = [known[name] for name in ("recorder.published_ns", OWED) if known.get(name, "").isdecimal()]
    return max(0, min(map(int, said), default=0) - RESUME_MARGIN_NS)
