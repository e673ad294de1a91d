"""How the time of one edge splits: the evidence that the edge's `split` asks for, and the parts that it gives.

The vocabulary says of an edge only by what it divides; here is found what of that was recorded around this request.
How a wait divides once its evidence is at hand is `kvtrace.division`, how own steps do is `kvtrace.own_steps`.
"""

from __future__ import annotations

from kvtrace import copies, division, own_steps, stages
from kvtrace.division import Part, Wait
from kvtrace.evidence import NOTHING, Posts, Timeline
from kvtrace.graph import Graph, Surroundings
from kvtrace.looks import AT_ONCE_NS
from kvtrace.model import NEVER_NS, Point, Request, Transfer
from kvtrace.modes import PULL

_NO_POSTS = Posts()
JOIN_NS = 10_000_000
AFTER_REPLY = "P's reply, after which the answer went on"
SENT_LATE = "the router to send the decode leg"
TO_POST = "a processor for the thread that posts"
TO_NOTICE = "a processor for D's thread that looks for the KV"
IN_CORE = "D's core, which takes requests in between two steps"


def divide(
    edge: stages.Edge, start_ns: int, end_ns: int, graph: Graph, request: Request, around: Surroundings
) -> list[Part]:
    """Return the parts of one edge of a request's graph, tiling [start_ns, end_ns), unix ns; [] if it took no time."""
    if end_ns <= start_ns:
        return []
    if edge.split:
        parts = _divide_by_evidence(edge, start_ns, end_ns, graph, request, around)
        if parts is not None:
            return parts
    waited_for = edge.after.name if edge.cause is not stages.UNKNOWN else f"whatever followed {edge.before.name}"
    if graph.last_rank and edge.after.name in _RANKED:
        waited_for = (edge.cause is stages.DETECTION and graph.held_up_by) or graph.last_rank
    whole = Part(start_ns, end_ns, edge.cause.name, waited_for)
    # Ranks that share a step wait for one another; one that spins meanwhile lacks a processor that it has no use for.
    if edge.cause is stages.DETECTION and not graph.last_rank:
        unlooked_ns = _unlooked_ns(whole, graph.points[edge.after.name], request)
        return own_steps.without_processor(whole, unlooked_ns, TO_NOTICE)
    if edge.cause is stages.POST:
        return own_steps.without_processor(whole, _unposted_ns(whole, graph.transfer, request), TO_POST)
    return _after_lost(whole, request) if request.lost and edge.before.name in _SENT else [whole]


def _unposted_ns(whole: Part, post: Transfer | None, request: Request) -> int:
    """Return for how long at least, ns, the thread that posts had no processor in this stretch of the post."""
    if post is None:
        return 0
    events = request.events.get(stages.POST_STARVED.name, ())
    counted_ns = max((one.b for one in events if (one.process, one.a) == (post.process, post.number)), default=0)
    return counted_ns - max(0, post.post_ended_ns - whole.end_ns)


def _unlooked_ns(whole: Part, notice: Point, request: Request) -> int:
    """Return for how long at least, ns, the thread that noticed the KV had no processor in this stretch before.

    What was counted since a look before the stretch may lie before it, too.
    """
    return max(
        (
            one.b - max(0, one.c - (whole.end_ns - whole.start_ns))
            for one in request.events.get(stages.NOTICE_STARVED.name, ())
            if (one.process, one.t_ns) == (notice.process, notice.t_ns)
        ),
        default=0,
    )


def _divide_by_evidence(
    edge: stages.Edge, start_ns: int, end_ns: int, graph: Graph, request: Request, around: Surroundings
) -> list[Part] | None:
    """Return the parts of an edge that divides by what was going on meanwhile, None where nothing of that is known."""
    if edge.split == "sender":
        return _divide_sender(start_ns, end_ns, graph, request, around)
    if edge.split in ("registration", "late"):
        return _divide_registration(edge, start_ns, end_ns, graph, request, around)
    if edge.split == "handshake":
        return _divide_handshake(edge, start_ns, end_ns, graph, request, around)
    if edge.split == "join":
        return _divide_join(edge, start_ns, end_ns, graph)
    if edge.split == "copy":
        return _divide_report(edge, start_ns, end_ns, graph, request, around)
    side, _, what = edge.split.partition(".")
    timeline = around.timelines.get(_engine(request, side), NOTHING)
    if what == "intake":
        return _divide_intake(edge, start_ns, end_ns, request, timeline)
    own = graph.prefill_steps if side == "prefill" else graph.decode_steps
    if what == "wait":
        has_blocks = edge.before is stages.READY
        wait = Wait(timeline, side, ()) if has_blocks else _wait(request, side, timeline, start_ns, end_ns)
        return division.divide_engine_wait(start_ns, end_ns, wait)
    if what == "steps":
        prompt_own = [pair for pair in own if pair[1]] if side == "prefill" else list(own)
        return _with_saves(own_steps.divide_steps(start_ns, end_ns, prompt_own, timeline, side), side, request, around)
    if what == "tail":
        steps = [step for step, is_prompt in own if is_prompt or side == "decode"]
        tail = own_steps.divide_tail(start_ns, end_ns, steps[-1] if steps else None, edge.cause.name)
        return _with_saves(tail, side, request, around)
    return division.divide_ride(start_ns, end_ns, timeline, edge.cause.name) if timeline.steps else None


_RANKED = frozenset(
    stage.name for stage in (stages.POST_ENDED, stages.ARRIVED, stages.NOTIFIED, stages.TRANSFER_DONE, stages.REPORTED)
)
_SENT = frozenset((stages.ROUTER_PREFILL_SENT.name, stages.ROUTER_DECODE_SENT.name))


def _with_saves(parts: list[Part], side: str, request: Request, around: Surroundings) -> list[Part]:
    """Divide the parts of P's steps by its copies to a host buffer; of several ranks by those of the last one."""
    saved = request.events.get(stages.PREFILL_COPIED.name) if side == "prefill" else None
    if not saved:
        return parts
    return copies.divide_save(parts, request, around.copied.get(max(saved).process, _NO_POSTS))


def _divide_report(
    edge: stages.Edge, start_ns: int, end_ns: int, graph: Graph, request: Request, around: Surroundings
) -> list[Part] | None:
    """Divide the time until D's worker reports the KV by its copy from a host buffer; None where there was none."""
    if stages.DECODE_COPIED.name not in request.events:
        return None
    done = around.copied.get(graph.points[edge.after.name].process, _NO_POSTS)
    whole = Part(start_ns, end_ns, edge.cause.name, graph.last_rank or edge.after.name)
    return copies.divide_load(whole, request, done, around.timelines.get(request.decode_engine, NOTHING))


def _divide_intake(
    edge: stages.Edge, start_ns: int, end_ns: int, request: Request, timeline: Timeline
) -> list[Part] | None:
    """Divide the way into a scheduler; None where it was taken in at once, and where an attempt was lost on the way."""
    intake_ns = _intake_ns(request, edge.after.name, end_ns)
    if intake_ns < division.INTAKE_NS or (request.lost and edge.before.name in _SENT):
        return None
    return division.divide_intake(start_ns, intake_ns, end_ns, timeline, edge.split.partition(".")[0])


def _intake_ns(request: Request, enqueued: str, at_ns: int) -> int:
    """Return for how long, ns, the request that was taken in then had been in the core's queue."""
    return max(event.d for event in request.events[enqueued] if event.t_ns == at_ns)


def _engine(request: Request, side: str) -> str:
    return request.prefill_engine if side == "prefill" else request.decode_engine


def _wait(request: Request, side: str, timeline: Timeline, start_ns: int, end_ns: int) -> Wait:
    """Return a wait for blocks between those times: when the scheduler looked, since when it was at work on them."""
    wait = Wait(timeline, side, _looked(request, side, timeline))
    given = [event for event in request.events.get(_LOOKS[side][2].name, ()) if start_ns <= event.t_ns <= end_ns]
    if not given or max(given).c <= AT_ONCE_NS or timeline.between(max(given).t_ns, end_ns):
        return wait
    return wait._replace(at_work_ns=max(given).t_ns - max(given).c)


def _looked(request: Request, side: str, timeline: Timeline) -> list[int] | None:
    """Return when the scheduler of that side looked at the request, unix ns; None where it was not seen to.

    A look in vain at one ahead of it counts too: the scheduler goes no further then.
    """
    considered, enqueued, allocated = _LOOKS[side]
    own = [event.t_ns for event in request.events.get(considered.name, ())]
    queued = request.events.get(enqueued.name)
    ahead: list[int] = []
    if queued:
        given = request.events.get(allocated.name)
        until_ns = min(event.t_ns for event in given) if given else NEVER_NS
        seen = set(own)
        ahead = [t_ns for t_ns in timeline.vain_looks(queued[0].t_ns, until_ns) if t_ns not in seen]
    return sorted(own + ahead) or None


_LOOKS = {
    "prefill": (stages.PREFILL_CONSIDERED, stages.PREFILL_ENQUEUED, stages.PREFILL_ALLOCATED),
    "decode": (stages.DECODE_CONSIDERED, stages.DECODE_ENQUEUED, stages.DECODE_ALLOCATED),
}


def _after_lost(whole: Part, request: Request) -> list[Part]:
    """Divide a leg's way to its engine: what went before under the same id and was lost is not the way's fault."""
    lost = [one for one in request.lost if one.end_ns > whole.start_ns and one.start_ns < whole.end_ns]
    if not lost:
        return [whole]
    begin_ns, stop_ns = max(whole.start_ns, lost[0].start_ns), min(whole.end_ns, lost[-1].end_ns)
    parts = [
        whole._replace(end_ns=begin_ns),
        Part(begin_ns, stop_ns, stages.ATTEMPT_LOST.name, ", ".join(one.request_id for one in lost)),
        whole._replace(start_ns=stop_ns),
    ]
    return [part for part in parts if part.end_ns > part.start_ns]


def _divide_join(edge: stages.Edge, start_ns: int, end_ns: int, graph: Graph) -> list[Part]:
    """Divide the answer's way to the client by P's reply, which a router that joins both legs waits for.

    That it did wait is supposed: a reply that comes by chance while the answer is on its way holds nobody, so only a
    long time tells of it.
    """
    whole = Part(start_ns, end_ns, edge.cause.name, edge.after.name)
    returned = graph.points.get(stages.ROUTER_PREFILL_RETURNED.name)
    if returned is None or not start_ns + JOIN_NS <= returned.t_ns <= end_ns:
        return [whole]
    held = Part(start_ns, returned.t_ns, stages.PREFILL_REPLY.name, AFTER_REPLY)
    return [held, whole._replace(start_ns=returned.t_ns)] if returned.t_ns < end_ns else [held]


def _sender_process(graph: Graph) -> int:
    if graph.transfer is not None:
        return graph.transfer.process
    picked = graph.points.get(stages.SENDER_PICKED.name)
    return picked.process if picked is not None else -1


def _divide_sender(start_ns: int, end_ns: int, graph: Graph, request: Request, around: Surroundings) -> list[Part]:
    """Divide a wait for P's sender thread: asleep, posting for others, or awake with something else."""
    process = _sender_process(graph)
    awake = around.timelines.get(request.prefill_engine, NOTHING).sender(process)
    posted = around.posted.get(process, _NO_POSTS)
    return division.divide_sender_wait(start_ns, end_ns, awake, posted, request.request_id)


def _divide_registration(
    edge: stages.Edge, start_ns: int, end_ns: int, graph: Graph, request: Request, around: Surroundings
) -> list[Part]:
    """Divide P's wait for a match: the registration is late, or it has arrived and the sender has not seen it.

    Where nothing was recorded of the sender (`late`), the rest is nobody's.
    """
    arrival_ns = min(max(graph.registration_arrival_ns or start_ns, start_ns), end_ns)
    parts: list[Part] = []
    at_ns = start_ns
    for name, waited_for in _REGISTRATION_CHAIN:
        point = graph.points.get(name)
        if point is None or point.t_ns <= at_ns or at_ns >= arrival_ns:
            continue
        stop_ns = min(point.t_ns, arrival_ns)
        if name == stages.DECODE_ALLOCATED.name and edge.split != "late":
            parts.extend(_divide_late_allocation(at_ns, stop_ns, request, around))
        else:
            decode = around.timelines.get(request.decode_engine, NOTHING)
            whole = Part(at_ns, stop_ns, stages.REGISTRATION_LATE.name, waited_for)
            for late in _by_intake(whole, request, point.t_ns) if name == stages.DECODE_ENQUEUED.name else [whole]:
                parts.extend(division.divide_by_handshake(late, decode, request.prefill_engine))
        at_ns = stop_ns
    parts.append(Part(at_ns, arrival_ns, stages.REGISTRATION_LATE.name, "D's registration, on its way"))
    if edge.split == "late":
        parts.append(
            Part(arrival_ns, end_ns, stages.UNKNOWN.name, "P's step and its sender, of which nothing is known")
        )
    else:
        parts.extend(_divide_sender(arrival_ns, end_ns, graph, request, around))
    return [part for part in parts if part.end_ns > part.start_ns]


def _by_intake(late: Part, request: Request, enqueued_ns: int) -> list[Part]:
    """Divide the way into D's scheduler, which a registration waited for: to the core's queue, then in it."""
    in_queue_ns = _intake_ns(request, stages.DECODE_ENQUEUED.name, enqueued_ns)
    if in_queue_ns < division.INTAKE_NS:
        return [late]
    came_ns = min(max(late.start_ns, enqueued_ns - in_queue_ns), late.end_ns)
    return [late._replace(end_ns=came_ns), late._replace(start_ns=came_ns, waited_for=IN_CORE)]


_REGISTRATION_CHAIN = (
    (stages.ROUTER_DECODE_SENT.name, SENT_LATE),
    (stages.DECODE_HTTP_RECEIVED.name, "the decode leg, on its way to D"),
    (stages.DECODE_ENQUEUED.name, "D's front end"),
    (stages.DECODE_ALLOCATED.name, "blocks on D"),
    (stages.REGISTRATION_QUEUED.name, "D's step to carry the registration to its worker"),
    (stages.REGISTRATION_SENT.name, "D's sender thread"),
)


def _divide_late_allocation(start_ns: int, end_ns: int, request: Request, around: Surroundings) -> list[Part]:
    """Divide a wait for blocks on D that made the registration late: capacity is named as such."""
    timeline = around.timelines.get(request.decode_engine, NOTHING)
    named = (stages.DECODE_QUEUE.name, stages.DECODE_CAPACITY.name)
    wait = _wait(request, "decode", timeline, start_ns, end_ns)
    return [
        part if part.cause in named else part._replace(cause=stages.REGISTRATION_LATE.name, waited_for="blocks on D")
        for part in division.divide_engine_wait(start_ns, end_ns, wait)
    ]


def _divide_handshake(
    edge: stages.Edge, start_ns: int, end_ns: int, graph: Graph, request: Request, around: Surroundings
) -> list[Part]:
    """Divide the time to prepare a transfer: a handshake of the side that drives it with the other, then preparing."""
    driver, peer = request.prefill_engine, request.decode_engine
    if request.mode == PULL:
        driver, peer = peer, driver
    process = graph.transfer.process if graph.transfer is not None else None
    part = Part(start_ns, end_ns, edge.cause.name, "blocks and descriptors")
    return division.divide_by_handshake(part, around.timelines.get(driver, NOTHING), peer, process)
