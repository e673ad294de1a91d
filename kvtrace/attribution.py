"""The answer for one request: shares per class that sum to the TTFT, the bracket, hidden work, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtrace import align, critical_path, evidence, pace, stages
from kvtrace.graph import Graph, Surroundings, build
from kvtrace.model import Attribution, Blocks, Event, Hidden, Process, Request, Segment

COMPLETE, INCOMPLETE, ABORTED = "complete", "incomplete", "aborted"
EXPIRED, FAILED, RECOMPUTED, NO_HANDOFF = "expired", "failed", "recomputed", "no handoff"
VERDICTS: Mapping[str, str] = {
    COMPLETE: "every rank's every transfer was seen complete",
    INCOMPLETE: "records that the hand-off must have left are missing",
    ABORTED: "the request was aborted before its answer was whole",
    EXPIRED: "P gave the blocks up before they were handed over",
    FAILED: "the request or its hand-off failed",
    RECOMPUTED: "D computed prompt tokens itself instead of using the hand-off",
    NO_HANDOFF: "no KV was handed over for this request",
}
"""What became of a hand-off, each with the sentence that says so."""


def surroundings(
    events: Iterable[Event], requests: Iterable[Request], processes: Mapping[int, Process]
) -> Surroundings:
    """Return what every walk of a run shares: timelines of the engines, least and fastest times of the pairs."""
    requests = list(requests)
    timelines = evidence.timelines(events, processes)
    senders = {process: awake for timeline in timelines.values() for process, awake in timeline.senders.items()}
    return Surroundings(
        processes=processes,
        timelines=timelines,
        least_message_ns=align.least_message_ns(requests, senders),
        fastest_ns=align.fastest_ns(requests),
        posted=pace.posts(requests, processes),
    )


def attribute(request: Request, around: Surroundings) -> Attribution:
    """Return the attribution of one request. Shares sum to the TTFT exactly, always."""
    graph = build(request, around)
    start, end = critical_path.ends(graph.points)
    segments = tuple(critical_path.path(graph, request, around))
    shares_ns = {kind.value: 0 for kind in stages.Class}
    for segment in segments:
        shares_ns[stages.CAUSE_BY_NAME[segment.cause].kind.value] += segment.end_ns - segment.start_ns
    low_ns, high_ns = _transfer_bounds(graph, segments, shares_ns[stages.Class.TRANSFER.value])
    verdict, note = _verdict(request, end is not None, around)
    start_ns = graph.points[start].t_ns if start is not None else _first_ns(request)
    return Attribution(
        request=request,
        verdict=verdict,
        scope="router" if start == stages.ROUTER_RECEIVED.name and end == stages.ROUTER_FIRST_TOKEN.name else "engine",
        note=note,
        start_ns=start_ns,
        first_token_ns=graph.points[end].t_ns if end is not None and start is not None else None,
        end_ns=_end_ns(request),
        segments=segments,
        hidden=tuple(_hidden(request, graph, end)),
        shares_ns=shares_ns,
        transfer_low_ns=low_ns,
        transfer_high_ns=high_ns,
        registration_late_ns=_registration_late_ns(graph),
        prompt_tokens=_payload(request, (stages.PREFILL_ENQUEUED, stages.DECODE_ENQUEUED)),
        output_tokens=_payload(request, (stages.DECODE_FINISHED,)),
        blocks=_blocks(request),
        pace=pace.pace(request, graph, around),
    )


def _transfer_bounds(graph: Graph, segments: tuple[Segment, ...], transfer_ns: int) -> tuple[int, int]:
    """Return the least and the most of the path that may have been transfer, in ns, given the wire's bracket."""
    arrived = graph.points.get(stages.ARRIVED.name)
    detection_end_ns = max((s.end_ns for s in segments if s.cause == stages.DETECTION.name), default=0)
    on_path = any(stages.CAUSE_BY_NAME[s.cause].kind is stages.Class.TRANSFER for s in segments) or detection_end_ns
    if arrived is None or not on_path:
        return transfer_ns, transfer_ns
    wire_ns = sum(s.end_ns - s.start_ns for s in segments if s.cause == stages.WIRE.name)
    low_ns = transfer_ns - min(wire_ns, max(0, arrived.t_ns - graph.arrived_low_ns))
    high_ns = transfer_ns + max(0, min(graph.arrived_high_ns, max(detection_end_ns, arrived.t_ns)) - arrived.t_ns)
    return low_ns, high_ns


def _registration_late_ns(graph: Graph) -> int | None:
    """Return by how much the registration could have been read after P had computed, in ns; negative is in time."""
    computed = graph.points.get(stages.PREFILL_COMPUTED.name)
    if computed is None or graph.registration_arrival_ns is None:
        return None
    return graph.registration_arrival_ns - computed.t_ns


def _hidden(request: Request, graph: Graph, end: str | None) -> Iterable[Hidden]:
    points = graph.points
    first_token = points.get(end) if end is not None else None
    sent = points.get(stages.REGISTRATION_SENT.name)
    ready_to_write = points.get(stages.PREFILL_COMPUTED.name)
    begun = next(
        (
            points[s.name]
            for s in (stages.ROUTER_DECODE_SENT, stages.DECODE_HTTP_RECEIVED, stages.DECODE_ENQUEUED)
            if s.name in points
        ),
        None,
    )
    if sent is not None and begun is not None and ready_to_write is not None:
        until_ns = min(sent.t_ns, max(ready_to_write.t_ns, begun.t_ns))
        slack_ns = max(0, ready_to_write.t_ns - (graph.registration_arrival_ns or sent.t_ns))
        if until_ns > begun.t_ns:
            yield Hidden(stages.REGISTRATION.name, begun.t_ns, until_ns - begun.t_ns, slack_ns)
    finished, returned = points.get(stages.PREFILL_FINISHED.name), points.get(stages.ROUTER_PREFILL_RETURNED.name)
    if request.mode == "push" and finished is not None and returned is not None and first_token is not None:
        yield Hidden(
            stages.PREFILL_RETURN.name,
            finished.t_ns,
            max(0, returned.t_ns - finished.t_ns),
            max(0, first_token.t_ns - returned.t_ns),
        )
    transfer = graph.transfer
    if (
        request.mode == "push"
        and transfer is not None
        and transfer.done_ns
        and transfer.post_ended_ns
        and first_token is not None
    ):
        yield Hidden(
            stages.SENDER_POLL.name,
            transfer.post_ended_ns,
            max(0, transfer.done_ns - transfer.post_ended_ns),
            max(0, first_token.t_ns - transfer.done_ns),
        )


def _verdict(request: Request, has_token: bool, around: Surroundings) -> tuple[str, str]:
    seen = request.events
    if has_token:
        return _verdict_of_answer(request, around)
    if stages.ROUTER_FAILED.name in seen:
        return FAILED, f"the router gave up: {seen[stages.ROUTER_FAILED.name][0].ref}"
    if stages.LEASE_EXPIRED.name in seen:
        return EXPIRED, "P's lease ended before the blocks were handed over"
    if any(stage.name in seen for stage in _ENDS_EARLY):
        return ABORTED, "the request was aborted before its first token"
    if stages.LOAD_FAILED.name in seen or stages.TRANSFER_FAILED.name in seen:
        return FAILED, "the hand-off failed"
    return INCOMPLETE, f"no first token was recorded; the last point is {_last_stage(request)}"


def _verdict_of_answer(request: Request, around: Surroundings) -> tuple[str, str]:
    seen = request.events
    if stages.LOAD_FAILED.name in seen:
        return RECOMPUTED, "the load failed and D computed the prompt itself"
    enqueued = seen.get(stages.DECODE_ENQUEUED.name)
    if not enqueued:
        return INCOMPLETE, "no event of the engine that answered"
    if not enqueued[0].c:
        return NO_HANDOFF, "D was not told of any KV to take over"
    if not any(event.b for event in seen.get(stages.DECODE_ALLOCATED.name, ())) and stages.READY.name not in seen:
        return (
            (COMPLETE, "D had the whole prompt cached")
            if request.mode != "unknown"
            else (INCOMPLETE, "no hand-off was seen")
        )
    if stages.READY.name not in seen:
        return INCOMPLETE, "D's scheduler was not seen to learn that the KV is there"
    if stages.PREFILL_ENQUEUED.name not in seen:
        return INCOMPLETE, "no event of the engine that computed the prompt"
    if not request.transfers:
        return INCOMPLETE, "no transfer was recorded"
    return _verdict_of_transfers(request, around)


def _verdict_of_transfers(request: Request, around: Surroundings) -> tuple[str, str]:
    unseen = [transfer for transfer in request.transfers if not align.completion_ns(transfer)]
    if unseen:
        return INCOMPLETE, f"{len(unseen)} of {len(request.transfers)} transfers were never seen complete"
    ranks = {event.a for event in request.events.get(stages.REPORTED.name, ())}
    expected = max((p.tp_size for p in around.processes.values() if p.engine == request.decode_engine), default=1)
    if len(ranks) < expected:
        return INCOMPLETE, f"{len(ranks)} of {expected} ranks of D reported the KV"
    return COMPLETE, ""


def _last_stage(request: Request) -> str:
    return max(((events[-1].t_ns, stage) for stage, events in request.events.items()), default=(0, "none"))[1]


def _first_ns(request: Request) -> int:
    return min((events[0].t_ns for events in request.events.values()), default=0)


def _end_ns(request: Request) -> int:
    for stage in (
        stages.ROUTER_DONE,
        stages.ROUTER_FAILED,
        stages.ROUTER_CANCELLED,
        stages.DECODE_HTTP_DONE,
        stages.DECODE_FINISHED,
    ):
        events = request.events.get(stage.name)
        if events:
            return events[-1].t_ns
    return max((event.t_ns for events in request.events.values() for event in events), default=0)


_ENDS_EARLY = (
    stages.ROUTER_CANCELLED,
    stages.DECODE_ABORTED,
    stages.PREFILL_ABORTED,
    stages.DECODE_HTTP_DISCONNECTED,
)


def _blocks(request: Request) -> Blocks:
    """Return what the hand-off kept occupied on either side."""
    seen = request.events

    def first_ns(stage: stages.Stage) -> int | None:
        return min((event.t_ns for event in seen.get(stage.name, ())), default=None)

    reserved = [event for event in seen.get(stages.DECODE_ALLOCATED.name, ()) if event.b]
    ready_ns = first_ns(stages.READY) or first_ns(stages.DECODE_ABORTED)
    kept = [event for event in seen.get(stages.PREFILL_FINISHED.name, ()) if event.b]
    let_go = [
        event.t_ns
        for stage in (stages.PREFILL_RELEASED, stages.LEASE_EXPIRED)
        for event in seen.get(stage.name, ())
        if kept and event.t_ns >= kept[0].t_ns
    ]
    over = [t_ns for stage in _ENDS_EARLY if (t_ns := first_ns(stage)) is not None]
    held_ns = min(let_go) - kept[0].t_ns if let_go else None
    return Blocks(
        reserved_blocks=reserved[0].a if reserved else 0,
        reserved_ns=max(0, ready_ns - reserved[0].t_ns) if reserved and ready_ns is not None else None,
        held_blocks=kept[0].a if kept else 0,
        held_ns=held_ns,
        held_after_end_ns=max(0, min(let_go) - max(min(over), kept[0].t_ns)) if let_go and over else None,
    )


def _payload(request: Request, from_stages: tuple[stages.Stage, ...]) -> int:
    for stage in from_stages:
        events: list[Event] | None = request.events.get(stage.name)
        if events:
            return events[0].a
    return 0


__all__ = ["VERDICTS", "attribute", "surroundings"]
