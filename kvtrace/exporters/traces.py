"""One request as one trace: the router's span on top, the legs as siblings, the hand-off below the leg that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import stages
from kvtrace.exporters import names
from kvtrace.exporters.names import own
from kvtrace.exporters.source import seen_ns
from kvtrace.exporters.spans import Kind, Link, Span, Value, origin, span_id
from kvtrace.modes import PUSH
from kvtrace.verdict import ABORTED, CORRUPT, EXPIRED, FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrace.exporters.source import Row, Told
    from kvtrace.exporters.spans import RunFacts
    from kvtrace.model import Transfer

_ERRORS = frozenset((FAILED, ABORTED, EXPIRED, CORRUPT))


def spans(told: Told, facts: RunFacts) -> list[Span]:
    """Return the spans of one request, its own first."""
    return list(_Trace(told, facts).spans())


class _Trace:
    """One request's trace under construction."""

    def __init__(self, told: Told, facts: RunFacts) -> None:
        self.told = told
        self.row = told.row
        self.model = facts.model
        self.origin = origin(told, facts.run)
        self._identity = f"{self.origin.trace_id:x}\0{self.origin.span_id:x}"
        self._pushes = self.row["mode"] == PUSH

    def spans(self) -> Iterator[Span]:
        root = self._root()
        yield root
        legs = {side: leg for side in ("prefill", "decode") if (leg := self._leg(root, side)) is not None}
        yield from legs.values()
        # The side that drives the transfer: P writes, or D reads.
        driver, peer = ("prefill", "decode") if self._pushes else ("decode", "prefill")
        working, other = legs.get(driver, root), legs.get(peer)
        handoff = self._handoff(working)
        if handoff is not None:
            _link(handoff, other, "hands over to" if self._pushes else "takes over from")
            yield handoff
        yield from self._handshakes(working)
        transfers = list(self._transfers(working, other))
        yield from transfers
        yield from self._detections(legs.get("decode", root), transfers)

    # The request and its legs -------------------------------------------------------------------------

    def _root(self) -> Span:
        row = self.row
        end_ns = max(row["end_ns"] or row["start_ns"], row["first_token_ns"] or 0)
        is_routers = row["scope"] != "engine"
        span = Span(
            "kvtrace.request", self.origin.trace_id, self.origin.span_id, self.origin.parent_id,
            "router" if is_routers else "decode", "" if is_routers else row["decode_engine"] or "",
            row["start_ns"], end_ns, Kind.SERVER, sampled=self.origin.sampled,
        )  # fmt: skip
        given: dict[str, Value | None] = {own(name): row[name] for name in (*names.FACTS, *names.SHARES)}
        given |= {
            names.MODEL: self.model or None,
            names.OPERATION: self._operation(),
            names.INPUT_TOKENS: row["prompt_tokens"],
            names.OUTPUT_TOKENS: row["output_tokens"],
            own("first_token_ns"): row["first_token_ns"],
        }
        span.attributes = {name: value for name, value in given.items() if value not in (None, "")}
        span.attributes |= _arrays(
            "segments", self.told.segments, ("cause", "class", "waited_for", "start_ns", "end_ns")
        )
        span.attributes |= _arrays("hidden", self.told.hidden, ("cause", "class", "start_ns", "duration_ns"))
        if row["verdict"] in _ERRORS:
            span.error = row["note"] or row["verdict"]
            span.attributes[names.ERROR_TYPE] = row["verdict"]
        done = self.told.first(stages.ROUTER_DONE, stages.ROUTER_FAILED)
        if done is not None and done.a:
            span.attributes[names.HTTP_STATUS] = done.a
        self._mark(span, _ROUTER_POINTS)
        return span

    def _operation(self) -> str | None:
        """Return what the client asked for, as the engine's own id says."""
        event = self.told.first(stages.DECODE_ENQUEUED, stages.PREFILL_ENQUEUED)
        if event is None:
            return None
        return "chat" if "chatcmpl-" in event.request else "text_completion" if "cmpl-" in event.request else None

    def _leg(self, root: Span, side: str) -> Span | None:
        begun, ended, cached, sent = _LEGS[side]
        start_ns = self.told.first_ns(*begun)
        if start_ns is None:
            return None
        end_ns = self.told.first_ns(*ended) or self.told.last_ns(f"{side}.") or start_ns
        leg = self._below(root, side, f"kvtrace.{side}", start_ns, end_ns, side)
        leg.kind = Kind.SERVER
        considered, address = self.told.first(cached), self.told.first(sent)
        if self.row["prompt_tokens"] is not None:
            leg.attributes[names.INPUT_TOKENS] = self.row["prompt_tokens"]
        if considered is not None:
            leg.attributes[names.CACHED_TOKENS] = considered.a
        if address is not None and address.ref:
            leg.attributes[names.URL] = address.ref
        if self.model:
            leg.attributes[names.MODEL] = self.model
        self._mark(leg, _LEG_POINTS[side])
        return leg

    def _below(self, parent: Span, side: str, name: str, start_ns: int, end_ns: int, part: str) -> Span:
        """Return a span below another one, of the engine of that side."""
        return Span(
            name, parent.trace_id, span_id(self._identity, part), parent.span_id, side,
            self.row[f"{side}_engine"] or "", start_ns, max(start_ns, end_ns), sampled=parent.sampled,
            attributes={own("request_id"): self.row["request_id"]},
        )  # fmt: skip

    def _mark(self, span: Span, wanted: tuple[stages.Stage, ...]) -> None:
        found = ((self.told.first_ns(stage), stage.name) for stage in wanted)
        span.points = sorted((t_ns, name) for t_ns, name in found if t_ns is not None)

    # The hand-off -------------------------------------------------------------------------------------

    def _handoff(self, leg: Span) -> Span | None:
        """Return the time from which both ends could have moved the KV until D's scheduler had it."""
        ready_ns = self.told.first_ns(stages.READY)
        finished_ns = self.told.first_ns(stages.PREFILL_FINISHED)
        asked_ns = self.told.first_ns(stages.DECODE_ENQUEUED)
        starts = (finished_ns, asked_ns)
        known = [t_ns for t_ns in starts if t_ns is not None]
        if ready_ns is None or not known:
            return None
        side = "prefill" if self._pushes else "decode"
        span = self._below(leg, side, "kvtrace.handoff", min(max(known), ready_ns), ready_ns, "handoff")
        for name in ("moved_bytes", "descriptors", "transfers", "registration_late_ns"):
            if self.row[name] is not None:
                span.attributes[own(name)] = self.row[name]
        self._mark(span, _HANDOFF_POINTS)
        return span

    def _handshakes(self, leg: Span) -> Iterator[Span]:
        """Yield what the pair spent on its first contact: on the path, or hidden beside it."""
        side = "prefill" if self._pushes else "decode"
        on_path = [(one["start_ns"], one["end_ns"], False) for one in self.told.segments if one["cause"] == _HANDSHAKE]
        beside = [
            (one["start_ns"], one["start_ns"] + one["duration_ns"], True)
            for one in self.told.hidden
            if one["cause"] == _HANDSHAKE
        ]
        for number, (start_ns, end_ns, is_hidden) in enumerate(sorted(on_path + beside)):
            span = self._below(leg, side, "kvtrace.handshake", start_ns, end_ns, f"handshake/{number}")
            span.attributes[own("hidden")] = is_hidden
            yield span

    def _transfers(self, leg: Span, other: Span | None) -> Iterator[Span]:
        side = "prefill" if self._pushes else "decode"
        request = self.told.request
        for number, transfer in enumerate(request.transfers if request is not None else ()):
            start_ns = transfer.post_started_ns or transfer.prepared_ns or transfer.done_ns or self._failed_ns(transfer)
            span = self._below(
                leg, side, "kvtrace.transfer", start_ns, seen_ns(transfer, pushes=self._pushes), f"transfer/{number}"
            )
            span.attributes |= {own(f"transfer.{name}"): value for name, value in _transfer_facts(transfer).items()}
            if transfer.failed:
                span.error = transfer.reason or "the transfer failed"
                span.attributes[names.ERROR_TYPE] = "transfer_failed"
            _link(span, other, "writes to" if self._pushes else "reads from")
            yield span

    def _failed_ns(self, transfer: Transfer) -> int:
        """Return when a transfer of which nothing else is known failed, unix ns: the agent may refuse to make one."""
        failed = self.told.request.events.get(stages.TRANSFER_FAILED.name, ()) if self.told.request is not None else ()
        times_ns = (event.t_ns for event in failed if (event.process, event.a) == (transfer.process, transfer.number))
        return min(times_ns, default=self.row["start_ns"])

    def _detections(self, leg: Span, transfers: list[Span]) -> Iterator[Span]:
        for number, one in enumerate(one for one in self.told.segments if one["cause"] == stages.DETECTION.name):
            part = f"detection/{number}"
            span = self._below(leg, "decode", "kvtrace.detection", one["start_ns"], one["end_ns"], part)
            span.attributes[own("waited_for")] = one["waited_for"]
            for transfer in transfers:
                _link(span, transfer, "notices")
            yield span


_HANDSHAKE = stages.HANDSHAKE.name
_ROUTER_POINTS = (
    stages.ROUTER_RECEIVED, stages.ROUTER_DECIDED, stages.ROUTER_PREFILL_SENT, stages.ROUTER_PREFILL_RETURNED,
    stages.ROUTER_DECODE_SENT, stages.ROUTER_FIRST_TOKEN, stages.ROUTER_DONE, stages.ROUTER_FAILED,
    stages.ROUTER_CANCELLED,
)  # fmt: skip
_LEG_POINTS = {
    "prefill": (
        stages.PREFILL_ENQUEUED, stages.PREFILL_ALLOCATED, stages.PREFILL_SCHEDULED, stages.PREFILL_FINISHED,
        stages.PREFILL_STAGED, stages.PREFILL_PREEMPTED, stages.LEASE_EXPIRED, stages.PREFILL_RELEASED,
    ),
    "decode": (
        stages.DECODE_ENQUEUED, stages.DECODE_ALLOCATED, stages.REGISTRATION_SENT, stages.LOAD_STARTED,
        stages.REPORTED, stages.READY, stages.DECODE_SCHEDULED, stages.DECODE_FIRST_TOKEN_OUT,
        stages.DECODE_PREEMPTED, stages.LOAD_FAILED, stages.DECODE_FINISHED,
    ),
}  # fmt: skip
_HANDOFF_POINTS = (stages.SENDER_PICKED, stages.REGISTRATION_RECEIVED, stages.MATCHED, stages.NOTIFIED, stages.REPORTED)
_LEGS = {
    "prefill": (
        (stages.PREFILL_HTTP_RECEIVED, stages.PREFILL_ENQUEUED),
        (
            stages.PREFILL_HTTP_DONE, stages.PREFILL_HTTP_RESPONDED, stages.PREFILL_HTTP_DISCONNECTED,
            stages.PREFILL_FINISHED, stages.PREFILL_ABORTED,
        ),
        stages.PREFILL_CONSIDERED,
        stages.ROUTER_PREFILL_SENT,
    ),
    "decode": (
        (stages.DECODE_HTTP_RECEIVED, stages.DECODE_ENQUEUED),
        (
            stages.DECODE_HTTP_DONE, stages.DECODE_HTTP_DISCONNECTED, stages.DECODE_FINISHED, stages.DECODE_ABORTED,
        ),
        stages.DECODE_CONSIDERED,
        stages.ROUTER_DECODE_SENT,
    ),
}  # fmt: skip


def _link(span: Span, to: Span | None, reason: str) -> None:
    if to is not None:
        span.links.append(Link(to.span_id, reason))


def _transfer_facts(transfer: Transfer) -> dict[str, Value]:
    """Return the numbers of one transfer; what was not seen is left out. Times in unix ns."""
    facts: dict[str, Value] = {
        "rank": transfer.rank,
        "number": transfer.number,
        "moved_bytes": transfer.moved_bytes,
        "descriptors": transfer.descriptors,
        "done_at_post": transfer.done_at_post,
    }
    if transfer.post_started_ns and transfer.post_ended_ns:
        facts["post_ns"] = transfer.post_ended_ns - transfer.post_started_ns
    for name in ("prepared_ns", "post_ended_ns", "last_pending_ns", "probed_ns", "done_ns", "notified_ns"):
        if t_ns := getattr(transfer, name):
            facts[name] = t_ns
    return facts


def _arrays(prefix: str, rows: list[Row], columns: tuple[str, ...]) -> dict[str, Value]:
    """Return one array per column, in order of the rows; attributes know no tables."""
    if not rows:
        return {}
    return {own(f"{prefix}.{name}"): [_known(row[name]) for row in rows] for name in columns}  # type: ignore[misc]


def _known(value: str | int | None) -> str | int:
    return "" if value is None else value
