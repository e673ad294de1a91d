"""A store as a Perfetto trace: engines as processes, threads as tracks, arrows from P to D, the critical path on top.

A request keeps one lane for its whole life, the same on every process, so that its parts are found side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from kvtrace import stages
from kvtrace.exporters import names, source
from kvtrace.exporters.engines import Engines, homes, of_engine
from kvtrace.exporters.lanes import Lanes
from kvtrace.exporters.packets import Packets
from kvtrace.modes import PUSH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrace.exporters.source import Choice, Told
    from kvtrace.store import Store

REQUEST_CATEGORY = "request"
CRITICAL_PATH = "critical path"

_ROLES_SQL = """
SELECT DISTINCT prefill_engine AS engine, 'prefill' AS role FROM request WHERE prefill_engine <> ''
UNION ALL SELECT DISTINCT decode_engine, 'decode' FROM request WHERE decode_engine <> ''
"""
_PROCESSES_SQL = "SELECT process, kind, engine, rank FROM engine_process ORDER BY process"
_PREFILL_PHASES = (
    ("front end", (stages.PREFILL_HTTP_RECEIVED,)),
    ("waiting for a step", (stages.PREFILL_ENQUEUED,)),
    ("computing", (stages.PREFILL_SCHEDULED,)),
    ("finished", (stages.PREFILL_FINISHED, stages.PREFILL_ABORTED)),
)
_DECODE_PHASES = (
    ("front end", (stages.DECODE_HTTP_RECEIVED,)),
    ("waiting for blocks", (stages.DECODE_ENQUEUED,)),
    ("waiting for KV", (stages.DECODE_ALLOCATED,)),
    ("ready", (stages.READY,)),
    ("computing", (stages.DECODE_SCHEDULED,)),
    ("decoding", (stages.DECODE_FIRST_TOKEN_OUT,)),
)
_LEG_ENDS = {
    "prefill": (stages.PREFILL_HTTP_DONE, stages.PREFILL_HTTP_DISCONNECTED, stages.PREFILL_FINISHED),
    "decode": (stages.DECODE_HTTP_DONE, stages.DECODE_HTTP_DISCONNECTED, stages.DECODE_FINISHED, stages.DECODE_ABORTED),
}
_ROUTER_POINTS = (
    stages.ROUTER_DECIDED, stages.ROUTER_PREFILL_RETURNED, stages.ROUTER_FIRST_TOKEN, stages.ROUTER_FAILED,
    stages.ROUTER_CANCELLED,
)  # fmt: skip
# Engines are drawn through a pause without any of the requests, unless it is longer.
_PAUSE_NS = 10_000_000_000
# Arrows of one request, each with an id of its own.
_TO_PREFILL, _TO_DECODE, _HANDOFF, _FLOWS = 0, 1, 2, 64


def write(store: Store, choice: Choice, out: BinaryIO) -> int:
    """Write the requests chosen, and what their engines did meanwhile; return how many requests.

    Raises ExportError where Perfetto's schema is not installed.
    """
    packets = Packets(out, source.extent(store, choice)[0])
    path = packets.process(CRITICAL_PATH, CRITICAL_PATH)
    roles = {row["engine"]: row["role"] for row in store.rows(_ROLES_SQL)}
    places = homes(packets, store.rows(_PROCESSES_SQL), roles)
    drawing = _Requests(packets, path, roles)
    for batch in source.batches(store, choice):
        for told in batch:
            drawing.draw(told)
    engines = Engines(packets, places)
    for from_ns, to_ns in source.stretches(store, choice, _PAUSE_NS):
        engines.draw(store, from_ns, to_ns + 1)
    return drawing.count


@dataclass(frozen=True, slots=True)
class _Phase:
    """A named part of a leg."""

    name: str
    start_ns: int
    end_ns: int


class _Requests:
    """Draws requests in order of their start."""

    def __init__(self, packets: Packets, path: int, roles: Mapping[str, str]) -> None:
        self.count = 0
        self._packets = packets
        self._path = path
        self._roles = roles
        self._lanes = Lanes()

    def draw(self, told: Told) -> None:
        """Draw one request on all its processes."""
        row = told.row
        lane = self._lanes.take(row["start_ns"], _over_ns(told))
        self._draw_path(told, lane)
        if told.request is not None:
            self._draw_router(told, lane)
            for side, phases in (("prefill", _PREFILL_PHASES), ("decode", _DECODE_PHASES)):
                self._draw_leg(told, lane, side, phases)
            self._draw_transfers(told, lane)
        self.count += 1

    def _flow(self, told: Told, which: int) -> int:
        return int(told.row["request_key"]) * _FLOWS + which + 1

    def _arrows(self, told: Told) -> list[int]:
        """Return an arrow from P to D for each transfer."""
        transfers = len(told.request.transfers) if told.request is not None else 0
        return [self._flow(told, _HANDOFF + number) for number in range(min(transfers, _FLOWS - _HANDOFF - 1))]

    def _draw_path(self, told: Told, lane: int) -> None:
        row = told.row
        track = self._packets.thread(self._path, f"request {lane + 1}", lane)
        notes = {name: row[name] for name in (*names.FACTS, *names.SHARES)}
        notes = {name: value for name, value in notes.items() if value not in (None, "")}
        start_ns = row["start_ns"]
        end_ns = row["first_token_ns"] or row["end_ns"] or start_ns
        self._packets.begin(track, start_ns, "", REQUEST_CATEGORY, notes, own_name=row["request_id"] or "request")
        for segment in told.segments:
            self._packets.slice(
                track, segment["start_ns"], segment["end_ns"], segment["cause"], segment["class"],
                {"waited_for": segment["waited_for"] or None, "crosses_hosts": segment["crosses_hosts"] or None},
            )  # fmt: skip
        self._packets.end(track, max(start_ns, end_ns))

    def _draw_router(self, told: Told, lane: int) -> None:
        start_ns = told.first_ns(stages.ROUTER_RECEIVED)
        if start_ns is None:
            return
        end_ns = told.last_ns("router.") or start_ns
        track = self._packets.thread(of_engine(self._packets, "", self._roles), f"request {lane + 1}", lane)
        self._packets.begin(track, start_ns, "request", "router", {"request_id": told.row["request_id"]})
        for stage, which in ((stages.ROUTER_PREFILL_SENT, _TO_PREFILL), (stages.ROUTER_DECODE_SENT, _TO_DECODE)):
            if (t_ns := told.first_ns(stage)) is not None:
                self._packets.instant(track, t_ns, stage.name, leaves=[self._flow(told, which)])
        for stage in _ROUTER_POINTS:
            if (t_ns := told.first_ns(stage)) is not None:
                self._packets.instant(track, t_ns, stage.name)
        self._packets.end(track, end_ns)

    def _draw_leg(
        self, told: Told, lane: int, side: str, wanted: tuple[tuple[str, tuple[stages.Stage, ...]], ...]
    ) -> None:
        phases = _phases(told, wanted, told.first_ns(*_LEG_ENDS[side]) or told.last_ns(f"{side}."))
        if not phases:
            return
        engine = of_engine(self._packets, told.row[f"{side}_engine"] or "", self._roles)
        track = self._packets.thread(engine, f"request {lane + 1}", lane)
        was_sent = told.first_ns(stages.ROUTER_PREFILL_SENT if side == "prefill" else stages.ROUTER_DECODE_SENT)
        arrives = [] if was_sent is None else [self._flow(told, _TO_PREFILL if side == "prefill" else _TO_DECODE)]
        notes = {"request_id": told.row["request_id"]}
        self._packets.begin(track, phases[0].start_ns, f"{side} leg", side, notes, arrives=arrives)
        pushes, arrows = told.row["mode"] == PUSH, self._arrows(told)
        for phase in phases:
            # Arrows from P to D: in pull P's finished blocks are read, in push the write makes D ready.
            leaves = arrows if not pushes and side == "prefill" and phase.name == "finished" else []
            lands = arrows if pushes and side == "decode" and phase.name == "ready" else []
            self._packets.slice(
                track, phase.start_ns, phase.end_ns, phase.name, side, leaves=leaves, arrives=lands
            )  # fmt: skip
        self._packets.end(track, phases[-1].end_ns)

    def _draw_transfers(self, told: Told, lane: int) -> None:
        pushes, arrows = told.row["mode"] == PUSH, self._arrows(told)
        side = "prefill" if pushes else "decode"
        engine = of_engine(self._packets, told.row[f"{side}_engine"] or "", self._roles)
        for number, transfer in enumerate(told.request.transfers if told.request is not None else ()):
            start_ns = transfer.post_started_ns or transfer.prepared_ns
            if not start_ns:
                continue
            end_ns = max(source.seen_ns(transfer, pushes=pushes), transfer.post_ended_ns, start_ns)
            name = f"transfers of rank {transfer.rank}, {lane + 1}.{number + 1}"
            track = self._packets.thread(engine, name, 100 + lane)
            notes = {
                "request_id": told.row["request_id"], "moved_bytes": transfer.moved_bytes,
                "descriptors": transfer.descriptors, "done_at_post": transfer.done_at_post,
                "last_pending_ns": transfer.last_pending_ns or None, "done_ns": transfer.done_ns or None,
                "notified_ns": transfer.notified_ns or None, "failed": transfer.reason if transfer.failed else None,
            }  # fmt: skip
            arrow = arrows[number : number + 1]
            self._packets.begin(
                track, start_ns, "transfer", "transfer", notes,
                leaves=arrow if pushes else (), arrives=() if pushes else arrow,
            )  # fmt: skip
            if transfer.post_started_ns and transfer.post_ended_ns:
                self._packets.slice(track, transfer.post_started_ns, transfer.post_ended_ns, "post", "transfer")
            self._packets.end(track, end_ns)


def _phases(told: Told, wanted: tuple[tuple[str, tuple[stages.Stage, ...]], ...], end_ns: int | None) -> list[_Phase]:
    """Return the phases whose beginnings were recorded, each until the next; they never run backwards."""
    begun = sorted(
        (t_ns, order, name) for order, (name, of) in enumerate(wanted) if (t_ns := told.first_ns(*of)) is not None
    )
    if not begun:
        return []
    last_ns = max(begun[-1][0], end_ns or 0)
    ends = [*(t_ns for t_ns, _, _ in begun[1:]), last_ns]
    return [_Phase(name, t_ns, end) for (t_ns, _, name), end in zip(begun, ends, strict=True)]


def _over_ns(told: Told) -> int:
    """Return when nothing more is drawn of the request."""
    events = told.request.events if told.request is not None else {}
    last_ns = max((event.t_ns for found in events.values() for event in found), default=0)
    known: tuple[int, ...] = (told.row["start_ns"], told.row["first_token_ns"] or 0, told.row["end_ns"] or 0)
    return max(*known, last_ns)
