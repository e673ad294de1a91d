"""Perfetto's packets: tracks, slices, instants, counters, each written as soon as it is known.

Names that repeat are interned, as the format means them to be; what a store's users chose (ids) is written where it
stands. Times are unix ns, on Perfetto's boot-time clock and, by a clock snapshot, on its real-time clock too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from kvtrace.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Note = str | int | bool

_SEQUENCE = 1
_NAME_LETTERS_MAX = 120


class Packets:
    """Writes one trace to a binary file. Track uuids are numbers from 1 in order of declaration."""

    def __init__(self, out: BinaryIO, start_ns: int) -> None:
        """Write the trace's head. Raises ExportError where Perfetto's schema is not installed."""
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema
            from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
        except ImportError as error:
            raise ExportError(
                f"the Perfetto format needs a package that is missing ({error.name}): pip install 'kvtrace[perfetto]'"
            ) from error
        self._schema: Any = schema
        self._builder = StreamingTraceProtoBuilder(out)
        self._tracks: dict[tuple[object, ...], int] = {}
        self._children: dict[int, int] = {}
        self._names: dict[tuple[str, str], int] = {}
        self._begin(start_ns)

    def _begin(self, start_ns: int) -> None:
        packet = self._packet(start_ns)
        packet.sequence_flags = self._schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.first_packet_on_sequence = True
        for clock in (self._schema.BUILTIN_CLOCK_BOOTTIME, self._schema.BUILTIN_CLOCK_REALTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=start_ns)
        self._builder.write_packet(packet)

    def _packet(self, t_ns: int) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.timestamp = t_ns
        packet.sequence_flags = self._schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    # Tracks -------------------------------------------------------------------------------------------

    def process(self, key: object, name: str) -> int:
        """Return the track of a process, declared with its first use."""
        known = self._tracks.get(("process", key))
        if known is not None:
            return known
        uuid, descriptor = self._declare(("process", key))
        descriptor.track_descriptor.process.pid = uuid
        descriptor.track_descriptor.process.process_name = _cut(name)
        descriptor.track_descriptor.child_ordering = self._schema.TrackDescriptor.EXPLICIT
        self._builder.write_packet(descriptor)
        return uuid

    def thread(self, parent: int, name: str, rank: int = 0) -> int:
        """Return a track of that name below a process, declared with its first use; `rank` orders its siblings."""
        return self._child(("thread", parent, name), parent, name, rank)

    def count_track(self, parent: int, name: str, unit: str = "") -> int:
        """Return a counter's track below a process, declared with its first use."""
        return self._child(("counter", parent, name), parent, name, -1, unit)

    def _child(self, key: tuple[object, ...], parent: int, name: str, rank: int, unit: str | None = None) -> int:
        known = self._tracks.get(key)
        if known is not None:
            return known
        uuid, descriptor = self._declare(key)
        track = descriptor.track_descriptor
        track.parent_uuid, track.name, track.sibling_order_rank = parent, _cut(name), rank
        if unit is not None:
            track.counter.unit_name = unit
        self._builder.write_packet(descriptor)
        return uuid

    def _declare(self, key: tuple[object, ...]) -> tuple[int, Any]:
        uuid = self._tracks[key] = len(self._tracks) + 1
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_descriptor.uuid = uuid
        return uuid, packet

    # Events -------------------------------------------------------------------------------------------

    def slice(
        self,
        track: int,
        start_ns: int,
        end_ns: int,
        name: str,
        category: str = "",
        notes: Mapping[str, Note | None] | None = None,
        *,
        leaves: Iterable[int] = (),
        arrives: Iterable[int] = (),
    ) -> None:
        """Write one slice with nothing inside."""
        self.begin(track, start_ns, name, category, notes, leaves=leaves, arrives=arrives)
        self.end(track, max(start_ns, end_ns))

    def begin(
        self,
        track: int,
        t_ns: int,
        name: str,
        category: str = "",
        notes: Mapping[str, Note | None] | None = None,
        *,
        leaves: Iterable[int] = (),
        arrives: Iterable[int] = (),
        own_name: str = "",
    ) -> None:
        """Begin a slice; flow arrows leave from it and end at it. `own_name` is shown and occurs only once."""
        packet = self._packet(t_ns)
        self._fill(packet, track, self._schema.TrackEvent.TYPE_SLICE_BEGIN, name, category, notes or {})
        if own_name:
            packet.track_event.name = _cut(own_name)
        packet.track_event.flow_ids.extend(leaves)
        packet.track_event.terminating_flow_ids.extend(arrives)
        self._builder.write_packet(packet)

    def end(self, track: int, t_ns: int) -> None:
        """End the slice begun last on the track."""
        packet = self._packet(t_ns)
        packet.track_event.type = self._schema.TrackEvent.TYPE_SLICE_END
        packet.track_event.track_uuid = track
        self._builder.write_packet(packet)

    def instant(self, track: int, t_ns: int, name: str, *, leaves: Iterable[int] = ()) -> None:
        """Write a point in time."""
        packet = self._packet(t_ns)
        self._fill(packet, track, self._schema.TrackEvent.TYPE_INSTANT, name, "", {})
        packet.track_event.flow_ids.extend(leaves)
        self._builder.write_packet(packet)

    def count(self, track: int, t_ns: int, value: int) -> None:
        """Write the value that a counter has from then on."""
        packet = self._packet(t_ns)
        event = packet.track_event
        event.type, event.track_uuid, event.counter_value = self._schema.TrackEvent.TYPE_COUNTER, track, value
        self._builder.write_packet(packet)

    def _fill(
        self, packet: Any, track: int, kind: int, name: str, category: str, notes: Mapping[str, Note | None]
    ) -> None:
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name_iid = self._interned(packet, "event_names", name)
        if category:
            event.category_iids.append(self._interned(packet, "event_categories", category))
        for key, value in notes.items():
            if value is None:
                continue
            note = event.debug_annotations.add(name_iid=self._interned(packet, "debug_annotation_names", key))
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = value

    def _interned(self, packet: Any, kind: str, name: str) -> int:
        iid = self._names.get((kind, name))
        if iid is None:
            iid = self._names[(kind, name)] = len(self._names) + 1
            getattr(packet.interned_data, kind).add(iid=iid, name=name)
        return iid


def _cut(name: str) -> str:
    """Return a name short enough to be shown; nothing in it can move a cursor. The whole one stands in a note."""
    shown = name if len(name) <= _NAME_LETTERS_MAX else name[: _NAME_LETTERS_MAX - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)
