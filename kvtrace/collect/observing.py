"""Who wants to know while a recording goes on: what was taken in, and which requests are over.

A request is over when some process saw its end and the points that come a little later have had time to arrive; it is
then told once, whatever the analysis makes of it afterwards. An observer that fails is noted and asked again: the
recording does not depend on it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from kvtrace import stages
from kvtrace.legs import base_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtrace.collect.stats import Stats
    from kvtrace.store import Store

SETTLE_NS = 1_500_000_000
"""So long after its end a request's last points are taken to be in: a poll on P, the spools of other processes."""
KEEP_NS = 600_000_000_000
"""At the end of a recording what began longer ago is not told of."""
TOLD_NS = 3 * KEEP_NS
"""A request that took longer is not told of; for so long is remembered what was."""
_ENDS = pa.array(
    [
        stage.name
        for stage in (
            stages.ROUTER_DONE, stages.ROUTER_FAILED, stages.ROUTER_CANCELLED, stages.DECODE_HTTP_DONE,
            stages.DECODE_HTTP_DISCONNECTED, stages.DECODE_FINISHED, stages.DECODE_ABORTED, stages.PREFILL_ABORTED,
        )
    ]
)  # fmt: skip
_IDLE_S = 1.0
_OVER_SQL = """
SELECT request_key, request_id, start_ns FROM request
WHERE start_ns >= $since AND ($everything OR request_id IN (SELECT unnest($ids::VARCHAR[]))) ORDER BY start_ns
"""


class Observer(Protocol):
    """Something that looks on. All calls come from the recorder's thread and hold it up while they last."""

    def took(self, store: Store, events: pa.Table) -> None:
        """Learn of events that were committed: columns of table event, in no order."""

    def over(self, store: Store, keys: Sequence[int], stats: Stats) -> None:
        """Learn of requests that are over, by their keys of this moment; called after each analysis, with none too."""

    def facts(self) -> dict[str, str]:
        """Return what the run's facts should say of it."""

    def finish(self) -> None:
        """Let go of what is left, within a few seconds: the recording ends."""


class Audience:
    """All observers of one recording."""

    def __init__(self, observers: Iterable[Observer], notice: Callable[[str, str], None]) -> None:
        self._observers = list(observers)
        self._notice = notice
        self._ended: dict[str, int] = {}  # by possible request id, when its end was seen
        self._ended_meanwhile: dict[str, int] = {}  # those that came since an analysis began: its answers lack them
        self._told: dict[tuple[str, int], None] = {}  # in order of telling
        self._newest_ns = 0
        self._taken_in_ns = 0
        self._known_ns: int | None = None  # what an analysis that is under way, or has just ended, knew of that
        self._next_s = 0.0

    def took_in(self, until_ns: int) -> None:
        """Learn that whatever was emitted before that time (Unix ns) is in the store."""
        self._taken_in_ns = until_ns

    def analysis_begins(self) -> None:
        """Learn that the next answers know only what is in the store by now."""
        self._known_ns = self._taken_in_ns
        self._note_meanwhile()

    def took(self, store: Store, events: pa.Table) -> None:
        """Pass on events that were committed."""
        if not self._observers:
            return
        import pyarrow.compute as pc  # costs every recording a twentieth of a second at its start

        self._newest_ns = max(self._newest_ns, pc.max(events.column("t_ns")).as_py() or 0)
        ended = self._ended if self._known_ns is None else self._ended_meanwhile
        ends = events.filter(pc.is_in(events.column("stage").cast(pa.string()), _ENDS))
        names, times = (ends.column(name).cast(to) for name, to in (("request", pa.string()), ("t_ns", pa.int64())))
        for name, t_ns in zip(names.to_pylist(), times.to_pylist(), strict=True):
            for base in (name, *base_ids(name)):
                ended[base] = max(t_ns, ended.get(base, 0))
        for observer in self._observers:
            self._guarded(observer, partial(observer.took, store, events))

    def analyzed(self, store: Store, stats: Stats, *, is_last: bool = False) -> None:
        """Tell which requests are over; at the last analysis all that were not told yet, as they stand."""
        known_ns, self._known_ns = self._taken_in_ns if self._known_ns is None else self._known_ns, None
        if not self._observers or (time.monotonic() < self._next_s and not is_last):
            return
        if is_last:
            self._note_meanwhile()
        self._next_s = time.monotonic() + _IDLE_S
        # By what the answers know: an analysis may take longer than points need to arrive.
        keys = self._over(store, known_ns, is_last=is_last)
        for observer in self._observers:
            self._guarded(observer, partial(observer.over, store, keys, stats))

    def _note_meanwhile(self) -> None:
        for name, t_ns in self._ended_meanwhile.items():
            self._ended[name] = max(t_ns, self._ended.get(name, 0))
        self._ended_meanwhile.clear()

    def finish(self) -> None:
        """Let all observers finish."""
        for observer in self._observers:
            self._guarded(observer, observer.finish)

    def facts(self) -> dict[str, str]:
        """Return the facts that the observers state."""
        return {name: value for observer in self._observers for name, value in observer.facts().items()}

    def _guarded(self, observer: Observer, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 -- an onlooker's trouble is none of the recording's
            self._notice(type(observer).__name__, f"failed: {type(error).__name__}: {error}")

    def _over(self, store: Store, known_ns: int, *, is_last: bool) -> list[int]:
        settled = [name for name, t_ns in self._ended.items() if is_last or t_ns + SETTLE_NS <= known_ns]
        if not self._newest_ns or (not settled and not is_last):
            return []
        # At the end what lacks one counts too, but for what an earlier recorder of this store has told.
        kept_ns = KEEP_NS if is_last else TOLD_NS
        since_ns = min((self._ended[name] for name in settled), default=self._newest_ns) - kept_ns
        rows = store.rows(_OVER_SQL, {"ids": settled, "since": since_ns, "everything": is_last})
        keys = []
        for row in rows:
            name = row["request_id"], row["start_ns"]
            if name not in self._told:
                self._told[name] = None
                keys.append(row["request_key"])
        for settled_name in settled:
            del self._ended[settled_name]
        while self._told and next(iter(self._told))[1] < self._newest_ns - TOLD_NS:
            del self._told[next(iter(self._told))]
        return keys
