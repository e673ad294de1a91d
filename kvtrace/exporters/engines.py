"""The engines' own tracks: steps, forwards, sender threads, counters; read from the store a stretch of time at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import stages
from kvtrace.exporters.lanes import Lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvtrace.exporters.packets import Packets
    from kvtrace.exporters.source import Row
    from kvtrace.store import Store

_WINDOW_NS = 10_000_000_000
# A step that is not over after so long belongs to a process that has ended.
_STEP_NS_MAX = 600_000_000_000
_STAGES = (
    stages.STEP_SCHEDULED, stages.STEP_STARTED, stages.STEP_FORWARDED, stages.STEP_CONNECTED, stages.STEP_ENDED,
    stages.SENDER_WOKE, stages.SENDER_SLEPT,
)  # fmt: skip
_EVENTS_SQL = """
SELECT t_ns, stage::VARCHAR AS stage, process, a, b, c, d FROM event
WHERE t_ns >= $from AND t_ns < $to AND stage::VARCHAR IN (SELECT unnest($stages)) ORDER BY t_ns
"""
_NEXT_SQL = "SELECT min(t_ns) FROM event WHERE t_ns >= $from AND stage::VARCHAR IN (SELECT unnest($stages))"

Event = tuple[int, str, int, int, int, int, int]
Home = tuple[int, str]
"""The track of the engine that a process belongs to, and what its own tracks are called."""


class Engines:
    """Draws what engines did between two times; `homes` says where each process belongs."""

    def __init__(self, packets: Packets, homes: Mapping[int, Home]) -> None:
        self._packets = packets
        self._homes = homes
        self._lanes: dict[tuple[int, str], Lanes] = {}
        self._scheduled: dict[tuple[int, int], Event] = {}
        self._started: dict[tuple[int, int], Event] = {}
        self._forwarded: dict[tuple[int, int], int] = {}
        self._slept_ns: dict[int, int] = {}
        self._draw: dict[str, Callable[[Home, Event], None]] = {
            stages.STEP_SCHEDULED.name: self._step_scheduled,
            stages.STEP_STARTED.name: self._step_started,
            stages.STEP_FORWARDED.name: self._step_forwarded,
            stages.STEP_CONNECTED.name: self._step_connected,
            stages.STEP_ENDED.name: self._step_ended,
            stages.SENDER_WOKE.name: self._sender_woke,
            stages.SENDER_SLEPT.name: self._sender_slept,
        }

    def draw(self, store: Store, from_ns: int, to_ns: int) -> None:
        """Write all tracks of [from_ns, to_ns), unix ns."""
        for event in _events(store, from_ns, to_ns):
            home = self._homes.get(event[2])
            if home is not None:
                self._draw[event[1]](home, event)
            if len(self._started) + len(self._scheduled) > 10_000:
                self._forget(event[0] - _STEP_NS_MAX)

    def _forget(self, before_ns: int) -> None:
        for known in (self._scheduled, self._started):
            for key in [key for key, event in known.items() if event[0] < before_ns]:
                del known[key]
                self._forwarded.pop(key, None)

    # The scheduler ------------------------------------------------------------------------------------

    def _step_scheduled(self, home: Home, event: Event) -> None:
        t_ns, _, process, step, tokens, requests, waiting = event
        self._scheduled[process, step] = event
        for name, value in (("requests", requests), ("tokens", tokens), ("waiting for KV", waiting)):
            self._packets.count(self._packets.count_track(home[0], f"{name} in step"), t_ns, value)

    def _step_ended(self, home: Home, event: Event) -> None:
        scheduled = self._scheduled.pop((event[2], event[3]), None)
        if scheduled is None:
            return
        start_ns, _, process, step, tokens, requests, waiting = scheduled
        notes = {"step": step, "tokens": tokens, "requests": requests, "waiting": waiting}
        # Steps end in the order of their starts, though the next may start before.
        lane = self._lanes.setdefault((process, "steps"), Lanes()).take(start_ns, event[0])
        track = self._packets.thread(home[0], f"{home[1]}: steps{_ordinal(lane)}", 200 + lane)
        self._packets.slice(track, start_ns, event[0], "step", "engine", notes)

    # The workers --------------------------------------------------------------------------------------

    def _step_started(self, _home: Home, event: Event) -> None:
        self._started[event[2], event[3]] = event

    def _step_forwarded(self, _home: Home, event: Event) -> None:
        if (event[2], event[3]) in self._started:
            self._forwarded[event[2], event[3]] = event[0]

    def _step_connected(self, home: Home, event: Event) -> None:
        key = event[2], event[3]
        started = self._started.pop(key, None)
        forwarded_ns = self._forwarded.pop(key, None)
        if started is None:
            return
        end_ns = max(event[0], forwarded_ns or 0)
        lane = self._lanes.setdefault((event[2], "forward"), Lanes()).take(started[0], end_ns)
        track = self._packets.thread(home[0], f"{home[1]}: forward thread{_ordinal(lane)}", 300 + lane)
        notes = {"step": event[3], "connector_ns": event[5], "before_forward_ns": event[6]}
        self._packets.begin(track, started[0], "worker step", "engine", notes)
        if forwarded_ns is not None:
            self._packets.slice(track, started[0], forwarded_ns, "forward", "engine")
        self._packets.end(track, end_ns)

    # The sender thread --------------------------------------------------------------------------------

    def _sender_woke(self, home: Home, event: Event) -> None:
        self._packets.count(self._packets.count_track(home[0], f"{home[1]}: sender queue"), event[0], event[4])

    def _sender_slept(self, home: Home, event: Event) -> None:
        track = self._packets.thread(home[0], f"{home[1]}: sender thread", 400)
        # Awake since it slept last at most: what says otherwise would begin inside another slice, or before all time.
        awake_ns = min(event[0], max(event[0] - event[3], self._slept_ns.get(event[2], 0)))
        self._slept_ns[event[2]] = event[0]
        self._packets.slice(track, awake_ns, event[0], "awake", "engine", {"queue_length": event[4]})
        self._packets.count(self._packets.count_track(home[0], f"{home[1]}: sender queue"), event[0], event[4])


def homes(packets: Packets, processes: list[Row], roles: Mapping[str, str]) -> dict[int, Home]:
    """Return where each process of the store is drawn; engines are declared as processes, named by their role."""
    found: dict[int, Home] = {}
    for row in processes:
        engine, rank = row["engine"], row["rank"]
        thread = row["kind"] or "process"
        thread = thread if rank is None else f"{thread} rank {rank}"
        found[row["process"]] = (of_engine(packets, engine, roles), thread)
    return found


def of_engine(packets: Packets, engine: str, roles: Mapping[str, str]) -> int:
    """Return the track of an engine, or of the router where that is ""."""
    return packets.process(engine, f"{roles.get(engine, 'engine')} {engine}" if engine else "router")


def _events(store: Store, from_ns: int, to_ns: int) -> Iterator[Event]:
    wanted = [stage.name for stage in _STAGES]
    start_ns: int | None = from_ns
    while start_ns is not None and start_ns < to_ns:
        end_ns = min(to_ns, start_ns + _WINDOW_NS)
        events = store.select(_EVENTS_SQL, {"from": start_ns, "to": end_ns, "stages": wanted}).values
        yield from events
        # Engines may have slept for days.
        start_ns = end_ns if events else store.select(_NEXT_SQL, {"from": end_ns, "stages": wanted}).values[0][0]


def _ordinal(lane: int) -> str:
    return f" {lane + 1}" if lane else ""
