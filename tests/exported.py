"""A store of hand-offs as events of round times, and what reads exports back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf.unknown_fields import UnknownFieldSet

from kvtrace import stages
from kvtrace.analyze import analyze
from kvtrace.store import Store
from tests.moulds import cast
from tests.test_analyze import fill
from tests.trace import Trace, pull, push

if TYPE_CHECKING:
    from pathlib import Path

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
CLIENT_SPAN = 0xB7AD6B7169203331
OWN_SPAN = 0x00F067AA0BA902B7
HOSTILE = (
    "it's",
    "'; DROP TABLE request; --",
    '"><script>alert(1)</script>',
    "${jndi:ldap://x}{{7*7}}",
    "a\x00b\x1b[31m\r\n\u2028\u202e",
    "é 漢 🦆",
    "../../etc/passwd",
    "x" * 10_000,
)


def signed(value: int) -> int:
    """Return 64 bits as the wire has them."""
    return value - (1 << 64) if value >> 63 else value


def traced(name: str, parent: int = CLIENT_SPAN, own: int = 0, flags: str = "01") -> Trace:
    """Return the place in a trace that the router records at 0 ms."""
    halves = signed(TRACE_ID >> 64), signed(TRACE_ID & ((1 << 64) - 1))
    return Trace().at(0, stages.ROUTER_TRACED, name, *halves, signed(parent), signed(own), ref=flags)


def failed(name: str) -> Trace:
    """Return a request that the router gave up after P had finished."""
    whole = push(name=name)
    trace = Trace()
    trace.events = [event for event in whole.events if event.t_ns <= whole.events[0].t_ns + 32_000_000]
    return trace.at(50, stages.ROUTER_FAILED, name, 502, ref="prefill: <b>lost</b>")


def with_handshake(trace: Trace) -> Trace:
    """Return a push in which P meets D for the first time, in 35.05..35.4 ms."""
    return trace.at(35.05, stages.HANDSHAKE_STARTED, "", 0, ref="engine-d", process=2).at(
        35.4, stages.HANDSHAKE_ENDED, "", 0, 1, ref="engine-d", process=2
    )


def write(path: Path, *traces: Trace, apart_ms: float = 200.0) -> Path:
    """Write a new store of these traces, one after another."""

    def make(made: Path) -> None:
        with Store.open(made, "write") as store:
            store.remember({"model": "tiny", "created_ns": "7", "vllm": "0.32.0"})
            for number, trace in enumerate(traces):
                fill(store, trace.later(number * apart_ms, 100 * (number + 1)))
            analyze(store)

    return cast(path, ("exported", apart_ms, *(tuple(trace.events) for trace in traces)), make)


def varied() -> list[Trace]:
    """Return hand-offs of every kind, and requests under hostile names."""
    first = with_handshake(push(name="kvt-push"))
    first.events += traced("kvt-push").events
    second = pull("kvt-pull")
    second.events += traced("kvt-pull", own=OWN_SPAN).events
    rest = [push(44.0, "kvt-late"), failed("kvt-failed"), pull("kvt-slow", dispatch_ms=30.0)]
    hostile = [push(name=name) if number % 2 else pull(name) for number, name in enumerate(HOSTILE)]
    return [first, second, *rest, *hostile]


# Perfetto ----------------------------------------------------------------------------------------------------


@dataclass
class Slice:
    """One slice as it was read."""

    track: tuple[str, ...]
    name: str
    category: str
    start_ns: int
    end_ns: int = -1
    notes: dict[str, Any] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    arrives: list[int] = field(default_factory=list)
    inside: list[Slice] = field(default_factory=list)


@dataclass
class Read:
    """A Perfetto trace: top slices by track, instants, counters."""

    slices: dict[tuple[str, ...], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    instants: list[Slice] = field(default_factory=list)
    counters: dict[tuple[str, ...], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def all(self) -> list[Slice]:
        """Return every slice, parents before what is inside."""
        found = [one for some in self.slices.values() for one in some]
        for one in found:
            found.extend(one.inside)
        return found


class Reader:
    """Reads a trace by Perfetto's own schema, and fails where a track, a name or an end is missing."""

    def __init__(self) -> None:
        self.read = Read()
        self._tracks: dict[int, tuple[str, ...]] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._events: dict[int, list[tuple[int, int, Any]]] = defaultdict(list)

    def parse(self, data: bytes) -> Read:
        """Return what the trace holds."""
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

        trace = schema.Trace.FromString(data)
        assert trace.packet[0].HasField("clock_snapshot")
        for order, packet in enumerate(trace.packet):
            assert not any(len(UnknownFieldSet(part)) for part in (packet, packet.track_event, packet.track_descriptor))
            for kind in ("event_names", "event_categories", "debug_annotation_names"):
                for entry in getattr(packet.interned_data, kind):
                    assert (kind, entry.iid) not in self._names
                    self._names[kind, entry.iid] = entry.name
            if packet.HasField("track_descriptor"):
                self._declare(packet.track_descriptor)
            elif packet.HasField("track_event"):
                self._take(order, packet, schema)
        for track, events in self._events.items():
            self._nest(self._tracks[track], sorted(events, key=lambda event: event[:2]), schema)
        return self.read

    def _declare(self, descriptor: Any) -> None:
        assert descriptor.uuid not in self._tracks
        parent = (self._tracks[descriptor.parent_uuid],) if descriptor.parent_uuid else ()
        name = descriptor.name or descriptor.process.process_name
        assert name
        self._tracks[descriptor.uuid] = (*(parent[0] if parent else ()), name)

    def _take(self, order: int, packet: Any, schema: Any) -> None:
        event = packet.track_event
        track = self._tracks[event.track_uuid]
        if event.type == schema.TrackEvent.TYPE_COUNTER:
            self.read.counters[track].append((packet.timestamp, event.counter_value))
        elif event.type == schema.TrackEvent.TYPE_INSTANT:
            self.read.instants.append(self._slice(packet))
        else:
            self._events[event.track_uuid].append((packet.timestamp, order, packet))

    def _slice(self, packet: Any) -> Slice:
        event = packet.track_event
        notes = {}
        for note in event.debug_annotations:
            kind = note.WhichOneof("value")
            notes[self._names["debug_annotation_names", note.name_iid]] = getattr(note, kind)
        return Slice(
            self._tracks[event.track_uuid],
            self._names["event_names", event.name_iid] if event.name_iid else event.name,
            self._names["event_categories", event.category_iids[0]] if event.category_iids else "",
            packet.timestamp, packet.timestamp, notes, list(event.flow_ids), list(event.terminating_flow_ids),
        )  # fmt: skip

    def _nest(self, track: tuple[str, ...], events: list[tuple[int, int, Any]], schema: Any) -> None:
        stack: list[Slice] = []
        for t_ns, _, packet in events:
            if packet.track_event.type == schema.TrackEvent.TYPE_SLICE_BEGIN:
                one = self._slice(packet)
                (stack[-1].inside if stack else self.read.slices[track]).append(one)
                stack.append(one)
            else:
                stack.pop().end_ns = t_ns
        assert not stack, f"{track}: {stack[-1].name} has no end"
