"""What engines are doing right now, told from their events in order of time: steps, queues, blocks, transfers.

Events of several processes arrive out of step, so they are held back for a moment and then taken in order. What is
remembered is bounded by what is under way; a thing whose end was never seen is forgotten after a while.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvtrace import stages
from kvtrace.metrics import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtrace.metrics.values import Values

HELD_BACK_NS = 1_000_000_000
REMEMBERED_MAX = 50_000


class Event(NamedTuple):
    """One event, as far as metrics care."""

    t_ns: int
    stage: str
    process: int
    request: str
    ref: str
    a: int
    b: int
    c: int
    d: int


class Place(NamedTuple):
    """Where a process belongs: its engine and what kind it is."""

    engine: str
    kind: str


class _Step:
    """One engine step under way."""

    __slots__ = ("connector_ns", "scheduled_ns")

    def __init__(self) -> None:
        self.scheduled_ns = 0
        self.connector_ns = 0


class _Transfer:
    """One transfer under way. Times in unix ns, 0 while unseen."""

    __slots__ = ("descriptors", "moved_bytes", "post_started_ns", "rank", "remote")

    def __init__(self) -> None:
        self.post_started_ns = 0
        self.moved_bytes = 0
        self.descriptors = 0
        self.rank = 0
        self.remote = ""


class Engines:
    """Keeps the metrics of engines up to date. `place` says where a process belongs."""

    def __init__(self, values: Values, place: Callable[[int], Place]) -> None:
        self._values = values
        self._place = place
        self._waiting: list[Event] = []
        self._steps: OrderedDict[tuple[str, int], _Step] = OrderedDict()
        self._transfers: OrderedDict[tuple[int, int], _Transfer] = OrderedDict()
        self._notified: OrderedDict[tuple[str, int], int] = OrderedDict()  # by request and the reader's rank
        self._silenced: set[int] = set()
        # By (engine, request): blocks kept or reserved, and requests that no step worked on yet.
        self._held: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._reserved: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._queued: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._gauged = (
            (names.HELD, self._held, True),
            (names.RESERVED, self._reserved, True),
            (names.WAITING, self._queued, False),
            (names.WAITING_FOR_KV, self._reserved, False),
        )
        self._engines: set[str] = set()
        self._take: Mapping[str, Callable[[Event, Place], None]] = {
            stages.STEP_SCHEDULED.name: self._step_scheduled,
            stages.STEP_CONNECTED.name: self._step_connected,
            stages.STEP_ENDED.name: self._step_ended,
            stages.PREPARED.name: self._prepared,
            stages.POST_STARTED.name: self._post_started,
            stages.POST_ENDED.name: self._post_ended,
            stages.NOTIFIED.name: self._was_notified,
            stages.TRANSFER_DONE.name: self._transfer_done,
            stages.TRANSFER_FAILED.name: self._transfer_failed,
            stages.HANDSHAKE_ENDED.name: self._handshake_ended,
            stages.LEASE_STARTED.name: self._lease_started,
            stages.LEASE_EXPIRED.name: self._lease_expired,
            stages.PREFILL_FINISHED.name: self._prefill_finished,
            stages.PREFILL_RELEASED.name: self._let_go,
            stages.DECODE_ALLOCATED.name: self._allocated,
            stages.READY.name: self._ready,
            stages.LOAD_FAILED.name: self._ready,
            stages.PREFILL_ENQUEUED.name: self._enqueued,
            stages.DECODE_ENQUEUED.name: self._enqueued,
            stages.PREFILL_SCHEDULED.name: self._dequeued,
            stages.DECODE_SCHEDULED.name: self._dequeued,
            stages.PREFILL_ABORTED.name: self._left,
            stages.DECODE_ABORTED.name: self._left,
            stages.DECODE_FINISHED.name: self._left,
            stages.DISABLED.name: self._disabled,
        }
        self.stages = frozenset(self._take)

    def add(self, events: Iterable[Event]) -> None:
        """Take events in, in any order."""
        self._waiting.extend(events)

    def advance(self, now_ns: int) -> None:
        """Work off what is old enough to be in order at `now_ns`, unix ns, and state the gauges."""
        ripe = sorted(event for event in self._waiting if event.t_ns <= now_ns - HELD_BACK_NS)
        self._waiting = [event for event in self._waiting if event.t_ns > now_ns - HELD_BACK_NS]
        for event in ripe:
            place = self._place(event.process)
            if place.engine and place.engine not in self._engines:
                self._begin(place.engine)
            self._take[event.stage](event, place)
        for memory in (self._steps, self._transfers, self._notified, self._held, self._reserved, self._queued):
            while len(memory) > REMEMBERED_MAX:
                memory.popitem(last=False)
        self._state_gauges()

    def _begin(self, engine: str) -> None:
        """Show what can go wrong on an engine as 0 before it does."""
        self._engines.add(engine)
        for metric in (names.LEASES, names.EXPIRED):
            self._values.begin(metric, engine)
        for metric in (names.TRANSFERS, names.HANDSHAKES):
            for outcome in names.OUTCOMES:
                self._values.begin(metric, engine, outcome)

    def _state_gauges(self) -> None:
        for metric, memory, counts_blocks in self._gauged:
            totals = dict.fromkeys(self._engines, 0)
            for (engine, _), blocks in memory.items():
                totals[engine] = totals.get(engine, 0) + (blocks if counts_blocks else 1)
            for engine, total in totals.items():
                self._values.put(metric, total, engine)

    # Steps --------------------------------------------------------------------------------------------

    def _step(self, engine: str, number: int) -> _Step:
        return self._steps.setdefault((engine, number), _Step())

    def _step_scheduled(self, event: Event, place: Place) -> None:
        self._values.put(names.RUNNING, event.c, place.engine)
        if event.b:
            self._step(place.engine, event.a).scheduled_ns = event.t_ns

    def _step_connected(self, event: Event, place: Place) -> None:
        # Ranks work side by side: the slowest counts.
        if (step := self._steps.get((place.engine, event.a))) is not None:
            step.connector_ns = max(step.connector_ns, event.c)

    def _step_ended(self, event: Event, place: Place) -> None:
        step = self._steps.pop((place.engine, event.a), None)
        if step is None:
            return
        self._values.add(names.STEPS, 1, place.engine)
        self._values.add(names.STEP_TIME, (event.t_ns - step.scheduled_ns) / 1e9, place.engine)
        self._values.add(names.CONNECTOR_TIME, step.connector_ns / 1e9, place.engine)

    # Transfers ----------------------------------------------------------------------------------------

    def _transfer(self, event: Event) -> _Transfer:
        return self._transfers.setdefault((event.process, event.a), _Transfer())

    def _prepared(self, event: Event, _place: Place) -> None:
        transfer = self._transfer(event)
        transfer.descriptors, transfer.rank, transfer.remote = event.b, event.c, event.ref

    def _post_started(self, event: Event, _place: Place) -> None:
        self._transfer(event).post_started_ns = event.t_ns

    def _post_ended(self, event: Event, place: Place) -> None:
        transfer = self._transfer(event)
        transfer.moved_bytes, transfer.descriptors = event.b, event.c or transfer.descriptors
        if transfer.post_started_ns:
            self._values.observe(names.POSTING, (event.t_ns - transfer.post_started_ns) / 1e9, place.engine)

    def _was_notified(self, event: Event, _place: Place) -> None:
        self._notified.setdefault((event.request, event.a), event.t_ns)

    def _transfer_done(self, event: Event, place: Place) -> None:
        transfer = self._transfers.pop((event.process, event.a), None)
        self._values.add(names.TRANSFERS, 1, place.engine, "done")
        if transfer is None:
            return
        self._values.add(names.MOVED, transfer.moved_bytes, place.engine)
        self._values.observe(names.DESCRIPTORS, transfer.descriptors, place.engine)
        if transfer.post_started_ns:
            # In push D's worker reads the notification before P polls; one from before the post is of another write.
            told_ns = self._notified.get((transfer.remote, transfer.rank), event.t_ns)
            seen_ns = min(event.t_ns, told_ns) if told_ns >= transfer.post_started_ns else event.t_ns
            seen_s = max(0, seen_ns - transfer.post_started_ns) / 1e9
            self._values.observe(names.SEEN, seen_s, place.engine)

    def _transfer_failed(self, event: Event, place: Place) -> None:
        self._transfers.pop((event.process, event.a), None)
        self._values.add(names.TRANSFERS, 1, place.engine, "failed")

    def _handshake_ended(self, event: Event, place: Place) -> None:
        self._values.add(names.HANDSHAKES, 1, place.engine, "done" if event.b else "failed")

    # Blocks and queues --------------------------------------------------------------------------------

    def _lease_started(self, _event: Event, place: Place) -> None:
        self._values.add(names.LEASES, 1, place.engine)

    def _lease_expired(self, event: Event, place: Place) -> None:
        self._values.add(names.EXPIRED, 1, place.engine)
        self._held.pop((place.engine, event.request), None)

    def _prefill_finished(self, event: Event, place: Place) -> None:
        self._queued.pop((place.engine, event.request), None)
        if event.b:
            self._held[place.engine, event.request] = event.a

    def _let_go(self, event: Event, place: Place) -> None:
        self._held.pop((place.engine, event.request), None)

    def _allocated(self, event: Event, place: Place) -> None:
        if event.b:
            self._reserved[place.engine, event.request] = event.a

    def _ready(self, event: Event, place: Place) -> None:
        self._reserved.pop((place.engine, event.request), None)

    def _enqueued(self, event: Event, place: Place) -> None:
        self._queued[place.engine, event.request] = 1

    def _dequeued(self, event: Event, place: Place) -> None:
        self._queued.pop((place.engine, event.request), None)

    def _left(self, event: Event, place: Place) -> None:
        self._queued.pop((place.engine, event.request), None)
        self._reserved.pop((place.engine, event.request), None)

    def _disabled(self, event: Event, place: Place) -> None:
        if event.process not in self._silenced:
            self._silenced.add(event.process)
            self._values.add(names.SILENCED, 1, place.kind)
