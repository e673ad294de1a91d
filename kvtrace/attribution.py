"""The answer for one request: shares per class that sum to the TTFT, the bracket, hidden work, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtrace import copies, critical_path, evidence, integrity, pace, remarks, stages, verdict
from kvtrace.align import fastest_ns, least_message_ns
from kvtrace.graph import Graph, Surroundings, build
from kvtrace.legs import CLIENT
from kvtrace.model import NEVER_NS, Attribution, Blocks, Event, Hidden, Point, Prefix, Process, Request, Segment
from kvtrace.modes import PULL, PUSH
from kvtrace.splits import TO_NOTICE
from kvtrace.verdict import ENDS_EARLY

# Who tells the prompt's length, without and with a stand-in on D, whose length is not the prompt's.
_TELL_PROMPT = (
    (stages.PREFILL_ENQUEUED, stages.DECODE_ENQUEUED, stages.CLIENT_SENT),
    (stages.PREFILL_ENQUEUED, stages.CLIENT_SENT),
)
# A transfer lies between the last of these points and the first of those.
_BEGUN = (stages.MATCHED, stages.LOAD_STARTED, stages.TRANSFER_BEGUN)
_NOTICED = (stages.REPORTED, stages.READY)


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
        least_message_ns=least_message_ns(requests, senders),
        fastest_ns=fastest_ns(requests),
        posted=pace.posts(requests),
        copied=copies.copied(requests),
    )


def attribute(request: Request, around: Surroundings) -> Attribution:
    """Return the attribution of one request. Shares sum to the TTFT exactly, always."""
    graph = build(request, around)
    start, end = critical_path.ends(graph.points)
    segments = tuple(critical_path.path(graph, request, around))
    shares_ns = {kind.value: 0 for kind in stages.Class}
    for segment in segments:
        shares_ns[stages.CAUSE_BY_NAME[segment.cause].kind.value] += segment.end_ns - segment.start_ns
    low_ns, high_ns = _transfer_bounds(request, graph, segments, shares_ns[stages.Class.TRANSFER.value])
    blocks, idle_ns = _blocks(request), _idle_ns(request, around)
    backwards_ns = critical_path.backwards_ns(graph.points)
    checked = integrity.integrity(request, around.processes)
    has_token = end is not None or backwards_ns is not None
    named, reason = verdict.verdict(request, around, checked, has_token=has_token)
    said = [*remarks.remarks(request, graph, around, blocks, idle_ns), *_imported(request, graph, around)]
    said += remarks.of_integrity(request, around, checked, named)
    if backwards_ns is not None:
        told = f"its first token is stamped {backwards_ns / 1e6:.1f} ms before its start"
        said.insert(0, f"{told}: the clocks of two hosts disagree by more than that, so no TTFT can be told")
    scope = _scope(request, start, end)
    start_ns = graph.points[start].t_ns if start is not None else request.first_ns
    return Attribution(
        request=request,
        verdict=named,
        scope=scope,
        note="; ".join(filter(None, [reason, *said])),
        start_ns=start_ns,
        first_token_ns=graph.points[end].t_ns if end is not None and start is not None else None,
        end_ns=_end_ns(request, scope),
        segments=segments,
        hidden=(*_hidden(request, graph, end, segments), *_hidden_handshakes(request, graph, segments, around)),
        shares_ns=shares_ns,
        transfer_low_ns=low_ns,
        transfer_high_ns=high_ns,
        registration_late_ns=_registration_late_ns(graph),
        prompt_tokens=_tokens(request, *_TELL_PROMPT[verdict.is_stand_in(request)]),
        output_tokens=_tokens(request, stages.DECODE_FINISHED, stages.CLIENT_DONE),
        blocks=blocks,
        pace=pace.pace(request, graph, around),
        idle_ns=idle_ns,
        integrity=checked,
        straggler=graph.straggler,
        prefix=_prefix(request),
    )


def _scope(request: Request, start: str | None, end: str | None) -> str:
    """Return where the request was seen; one without a first token is counted with those that had theirs there.

    One of which only its client tells was seen by nobody else.
    """
    if start == stages.CLIENT_SENT.name or (request.events and all(one.startswith(CLIENT) for one in request.events)):
        return "client"
    is_routers = start == stages.ROUTER_RECEIVED.name and end in (None, stages.ROUTER_FIRST_TOKEN.name)
    return "router" if is_routers else "engine"


def _imported(request: Request, graph: Graph, around: Surroundings) -> Iterable[str]:
    """Yield what is to be said of points that kvtrace did not record itself."""
    formats = {process.process: process.imported for process in around.processes.values() if process.imported}
    if not formats:
        return
    found = {formats[e.process] for events in request.events.values() for e in events if e.process in formats}
    if found:
        yield f"points imported from {', '.join(sorted(found))}"
    outside_ns = critical_path.outside_client_ns(graph.points)
    if outside_ns is not None and outside_ns > 0:
        yield f"its client's clock is {outside_ns / 1e6:.3f} ms or more off, so the client's record has no place in it"


def _transfer_bounds(
    request: Request, graph: Graph, segments: tuple[Segment, ...], transfer_ns: int
) -> tuple[int, int]:
    """Return the least and the most of the path that may have been transfer, in ns, given the wire's bracket."""
    if graph.transfer is None:
        return transfer_ns, transfer_ns + _unseen_ns(request, graph, segments)
    arrived = graph.points.get(stages.ARRIVED.name)
    unnoticed = (s for s in segments if s.cause == stages.DETECTION.name or s.waited_for == TO_NOTICE)
    detection_end_ns = max((s.end_ns for s in unnoticed), default=0)
    on_path = any(stages.CAUSE_BY_NAME[s.cause].kind is stages.Class.TRANSFER for s in segments) or detection_end_ns
    if arrived is None or not on_path:
        return transfer_ns, transfer_ns
    wire_ns = sum(s.end_ns - s.start_ns for s in segments if s.cause == stages.WIRE.name)
    low_ns = transfer_ns - min(wire_ns, max(0, arrived.t_ns - graph.arrived_low_ns))
    arrived_ns = max(arrived.t_ns, segments[0].start_ns)  # of the path, which may begin later
    high_ns = transfer_ns + max(0, min(graph.arrived_high_ns, max(detection_end_ns, arrived_ns)) - arrived_ns)
    return low_ns, high_ns


def _unseen_ns(request: Request, graph: Graph, segments: tuple[Segment, ...]) -> int:
    """Return how much unattributed time a transfer can have taken of which nothing was recorded, in ns."""
    enqueued = request.events.get(stages.DECODE_ENQUEUED.name)
    if enqueued and not enqueued[0].c:
        return 0  # D was told of none
    begun_ns, noticed_ns = (
        [graph.points[stage.name].t_ns for stage in some if stage.name in graph.points] for some in (_BEGUN, _NOTICED)
    )
    from_ns, until_ns = max(begun_ns, default=0), min(noticed_ns, default=NEVER_NS)
    unknown = (segment for segment in segments if segment.cause == stages.UNKNOWN.name)
    return sum(max(0, min(one.end_ns, until_ns) - max(one.start_ns, from_ns)) for one in unknown)


def _prefix(request: Request) -> Prefix:
    """Return what D found in its cache, and what was to come from P, when it reserved blocks for the request."""
    looks = sorted(request.events.get(stages.DECODE_CONSIDERED.name, ()))
    allocated = min(request.events.get(stages.DECODE_ALLOCATED.name, ()), default=None)
    if allocated is not None:
        looks = [look for look in looks if look.t_ns <= allocated.t_ns]
    told = allocated or (looks[-1] if looks else None)
    return Prefix(looks[-1].a if looks else None, told.b if told is not None else None)


def _registration_late_ns(graph: Graph) -> int | None:
    """Return by how much the registration could have been read after P had computed, in ns; negative is in time."""
    computed = graph.points.get(stages.PREFILL_COMPUTED.name)
    if computed is None or graph.registration_arrival_ns is None:
        return None
    return graph.registration_arrival_ns - computed.t_ns


def _hidden(request: Request, graph: Graph, end: str | None, segments: tuple[Segment, ...]) -> Iterable[Hidden]:
    """Yield what went on beside the path: D's registration, P's reply and P's poll, where nothing waited for them."""
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
    if (
        request.mode == PUSH
        and finished is not None
        and returned is not None
        and first_token is not None
        and not _was_waited_for(returned, points, segments)
    ):
        yield Hidden(
            stages.PREFILL_RETURN.name,
            finished.t_ns,
            max(0, returned.t_ns - finished.t_ns),
            max(0, first_token.t_ns - returned.t_ns),
        )
    transfer = graph.transfer
    if (
        request.mode == PUSH
        and transfer is not None
        and transfer.done_ns
        and transfer.post_ended_ns
        and first_token is not None
        and stages.TRANSFER_DONE.name not in points  # else D's notification was not seen, and the path rests on this
    ):
        yield Hidden(
            stages.SENDER_POLL.name,
            transfer.post_ended_ns,
            max(0, transfer.done_ns - transfer.post_ended_ns),
            max(0, first_token.t_ns - transfer.done_ns),
        )


def _was_waited_for(returned: Point, points: Mapping[str, Point], segments: tuple[Segment, ...]) -> bool:
    """Return whether D's leg, or the answer, waited for P's reply: then the reply is no work beside the path."""
    sent = points.get(stages.ROUTER_DECODE_SENT.name)
    is_on_path = any(segment.cause == stages.PREFILL_REPLY.name for segment in segments)
    return is_on_path or (sent is not None and sent.t_ns >= returned.t_ns)


def _hidden_handshakes(
    request: Request, graph: Graph, segments: tuple[Segment, ...], around: Surroundings
) -> Iterable[Hidden]:
    """Yield first contacts of the pair that took place while the request was under way and did not keep it waiting."""
    prepared = graph.points.get(stages.PREPARED.name)
    driver, peer = request.prefill_engine, request.decode_engine
    if request.mode == PULL:
        driver, peer = peer, driver
    timeline = around.timelines.get(driver)
    if prepared is None or timeline is None or not segments:
        return
    waited = [(one.start_ns, one.end_ns) for one in segments if one.cause == stages.HANDSHAKE.name]
    for shake in timeline.handshakes:
        is_meanwhile = segments[0].start_ns <= shake.start_ns and shake.end_ns <= prepared.t_ns
        is_on_path = any(start_ns < shake.end_ns and shake.start_ns < end_ns for start_ns, end_ns in waited)
        if shake.peer == peer and is_meanwhile and not is_on_path:
            duration_ns, slack_ns = shake.end_ns - shake.start_ns, prepared.t_ns - shake.end_ns
            yield Hidden(stages.HANDSHAKE.name, shake.start_ns, duration_ns, slack_ns)


def _idle_ns(request: Request, around: Surroundings) -> int | None:
    """Return how long the engine that the request came to first had made no step, in ns; None if that is unknown."""
    came = [
        (events[0].t_ns, engine)
        for stage, engine in (
            (stages.PREFILL_ENQUEUED, request.prefill_engine),
            (stages.DECODE_ENQUEUED, request.decode_engine),
        )
        if (events := request.events.get(stage.name)) and engine in around.timelines
    ]
    if not came:
        return None
    at_ns, engine = min(came, key=lambda one: one[0])
    return around.timelines[engine].idle_ns(at_ns)


def _end_ns(request: Request, scope: str) -> int:
    for stage in (*(_CLIENT_ENDS if scope == "client" else ()), *_SERVING_ENDS):
        events = request.events.get(stage.name)
        if events:
            return events[-1].t_ns
    return max((e.t_ns for name, es in request.events.items() if name not in integrity.STAGES for e in es), default=0)


_CLIENT_ENDS = (stages.CLIENT_DONE, stages.CLIENT_FAILED)
_SERVING_ENDS = (
    stages.ROUTER_DONE,
    stages.ROUTER_FAILED,
    stages.ROUTER_CANCELLED,
    stages.DECODE_HTTP_DONE,
    stages.DECODE_FINISHED,
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
    ends = (*ENDS_EARLY, stages.ROUTER_FAILED)
    over = [t_ns for stage in ends if (t_ns := first_ns(stage)) is not None]
    held_ns = min(let_go) - kept[0].t_ns if let_go else None
    return Blocks(
        reserved_blocks=reserved[0].a if reserved else 0,
        reserved_ns=max(0, ready_ns - reserved[0].t_ns) if reserved and ready_ns is not None else None,
        held_blocks=kept[0].a if kept else 0,
        held_ns=held_ns,
        held_after_end_ns=max(0, min(let_go) - max(min(over), kept[0].t_ns)) if let_go and over else None,
    )


def _tokens(request: Request, *told_by: stages.Stage) -> int | None:
    """Return the count of the first of these stages that tells one, None where none does."""
    for stage in told_by:
        events = request.events.get(stage.name)
        if events and (events[0].a or stage.where is not stages.Where.CLIENT):  # a client that does not say has 0
            return events[0].a
    return None
