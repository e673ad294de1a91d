"""After the first token: how D's steps paced the tokens of a request, and what made those steps longer.

A request that decodes is in every step of its engine until it ends or is preempted, so D's steps tell when its tokens
came. The parts of a pace tile [first token, last token] exactly, in integer nanoseconds, as a critical path does.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace import division, own_steps, stages
from kvtrace.division import Part
from kvtrace.evidence import Posts, Timeline
from kvtrace.graph import Graph, Surroundings
from kvtrace.model import NEVER_NS, Event, Pace, Posted, Request, Step


def posts(requests: Iterable[Request]) -> dict[int, Posts]:
    """Return per process the calls that posted transfers."""
    found: dict[int, list[Posted]] = {}
    for request in requests:
        for transfer in request.transfers:
            if transfer.post_started_ns and transfer.post_ended_ns:
                span = Posted(transfer.post_started_ns, transfer.post_ended_ns, request.request_id, transfer.process)
                found.setdefault(transfer.process, []).append(span)
    return {process: Posts(spans) for process, spans in found.items()}


def pace(request: Request, graph: Graph, around: Surroundings) -> Pace | None:
    """Return how D paced the request; None where its first or its last token was not seen.

    A preempted request gets no tokens until it is scheduled again: the steps meanwhile work on others.
    """
    sampled = graph.points.get(stages.DECODE_SAMPLED.name)
    finished = request.events.get(stages.DECODE_FINISHED.name, ())
    ended = finished or request.events.get(stages.DECODE_ABORTED.name, ())
    timeline = around.timelines.get(request.decode_engine)
    if sampled is None or not ended or not graph.decode_steps or timeline is None:
        return None
    away = _away(request)
    found = Pace(sampled.t_ns, sampled.t_ns)
    token_ns = sampled.t_ns
    held = (around.posted, around.copied)
    for step in _following(graph.decode_steps[-1][0], ended[-1], timeline):
        is_own = not any(start_ns <= step.scheduled_ns < end_ns for start_ns, end_ns in away)
        for part in _divide(step, found.end_ns, is_own=is_own):
            found.parts_ns[part.cause] = found.parts_ns.get(part.cause, 0) + part.end_ns - part.start_ns
        found.end_ns = max(found.end_ns, step.ended_ns)
        if is_own:
            found.itl_ns.append(found.end_ns - token_ns)
            token_ns = found.end_ns
            _charge(found, step, [spans[step.slowest] for spans in held if step.slowest in spans])
    found.parts_ns = {cause: spent_ns for cause, spent_ns in found.parts_ns.items() if spent_ns}
    found.tokens = max(0, finished[-1].a - 1) if finished else len(found.itl_ns)
    return found


def _following(first: Step, ended: Event, timeline: Timeline) -> Iterable[Step]:
    """Yield the steps with tokens after the first token's, up to the one whose result ended the request."""
    for step in timeline.between(first.scheduled_ns + 1, ended.t_ns):
        if step.tokens and step.ended_ns:
            yield step
            if step.ended_ns >= ended.t_ns:
                return


def _away(request: Request) -> list[tuple[int, int]]:
    """Return the times, in unix ns, in which the request was preempted: until a step includes it again."""
    scheduled = sorted(event.t_ns for event in request.events.get(stages.DECODE_SCHEDULED.name, ()))
    spans = []
    for event in request.events.get(stages.DECODE_PREEMPTED.name, ()):
        again = next((t_ns for t_ns in scheduled if t_ns > event.t_ns), NEVER_NS)
        spans.append((event.t_ns, again))
    return spans


def _divide(step: Step, at_ns: int, *, is_own: bool) -> list[Part]:
    """Divide [at_ns, the step's end): the scheduler's turn, the way to the workers, connector, forward, taking in."""
    end_ns = max(at_ns, step.ended_ns)  # results may be seen out of order: such a step takes no time of its own

    def inside(t_ns: int) -> int:
        return min(max(t_ns, at_ns), end_ns)

    made_ns = inside(step.scheduled_ns)
    parts = division.divide_turn(at_ns, made_ns, division.Turn(starved_ns=step.starved_ns), stages.DECODE_TURN.name)
    if not is_own:
        return [*parts, Part(made_ns, end_ns, stages.DECODE_OTHERS.name, "")]
    started_ns = inside(step.started_ns or step.scheduled_ns)
    began_ns = inside(started_ns + step.before_forward_ns)
    forwarded_ns = max(began_ns, inside(step.forwarded_ns))
    # A step that computes more tokens than it has requests works on somebody's prompt too.
    forward = stages.DECODE_MIXED if step.tokens > step.requests else stages.DECODE_TOKEN
    parts += [
        Part(made_ns, started_ns, stages.DECODE_LAUNCH.name, ""),
        Part(started_ns, began_ns, stages.STEP_CONNECTOR.name, ""),
        *own_steps.divide_by_processor(Part(began_ns, forwarded_ns, forward.name, ""), step.forward_starved_ns, step),
    ]
    return parts + own_steps.divide_tail(forwarded_ns, end_ns, step, stages.DECODE_SAMPLE.name)


def extension_ns(step: Step) -> tuple[int, int]:
    """Return by how much connector work made the step longer, before its forward and behind it, in ns.

    Work behind the launch of an asynchronous forward costs only what it outlasts the forward by.
    """
    behind_ns = max(0, step.connector_ns - step.before_forward_ns)
    outlasting_ns = step.connected_ns - step.forwarded_ns if step.forwarded_ns else behind_ns
    return step.before_forward_ns, max(0, min(behind_ns, outlasting_ns))


def _charge(found: Pace, step: Step, held: list[Posts]) -> None:
    """Add the step's connector time to the pace, and blame those for whom its slowest rank posted or copied in it."""
    before_ns, behind_ns = extension_ns(step)
    found.extension_ns += before_ns + behind_ns
    found.occupancy_ns += step.connector_ns
    if not held or not before_ns + behind_ns:
        return
    began_ns = step.started_ns or step.scheduled_ns
    forward_ns = began_ns + before_ns
    for start_ns, end_ns in (
        (began_ns, forward_ns),
        (max(forward_ns, step.connected_ns - behind_ns), step.connected_ns),
    ):
        for span in (span for spans in held for span in spans.during(start_ns, end_ns)):
            spent_ns = span.end_ns - span.start_ns
            found.blame_ns[span.request_id] = found.blame_ns.get(span.request_id, 0) + spent_ns
