"""How a wait divides into causes, by what the engines and the sender threads did meanwhile.

A wait is charged to something only while that something is known to be outstanding; the rest is unattributed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvtrace import stages
from kvtrace.evidence import Posts, Timeline, step_end_ns
from kvtrace.model import NEVER_NS, Awake, Limits, Step
from kvtrace.occupancy import Held
from kvtrace.wording import plural

# Between two steps the scheduler takes in results and makes up the next step; after a step without work vLLM's loop
# sleeps one millisecond, from which a busy Linux wakes it up to a time slice (3 ms) late. What the kernel says it was
# late beyond that, its thread having waited for a processor, counts too. Longer pauses are nobody's.
TURN_NS = 1_000_000
EMPTY_TURN_NS = 4_000_000
# The core takes requests in between two steps. One that waited in its queue for less was taken in at once.
INTAKE_NS = 1_000_000
# A scheduler that looks at a waiting request again and again is shown doing so at most this often.
LOOK_NS = 10_000_000
NO_STEP = "the engine's core, of which no step was recorded then"
"""What was waited for in a pause of an engine of which nothing is known."""


class Turn(NamedTuple):
    """For how long the scheduler's turn behind a step may take, ns, and how much longer its thread had no processor."""

    own_ns: int = TURN_NS
    starved_ns: int = 0


class Part(NamedTuple):
    """A stretch of a wait with its cause: start and end in unix ns, the cause's name, what was waited for."""

    start_ns: int
    end_ns: int
    cause: str
    waited_for: str


def divide_by_handshake(part: Part, timeline: Timeline, peer: str, process: int | None = None) -> list[Part]:
    """Divide a stretch by the engine's handshakes with that peer: while one is under way, that is the cause.

    A worker shakes one hand at a time, so before its own a pair may wait for others'. `process` is the worker, None
    for any.
    """
    own = [
        one for one in timeline.handshakes
        if one.peer == peer and one.end_ns > part.start_ns and one.start_ns < part.end_ns
        and (process is None or one.process in (0, process))
    ]  # fmt: skip
    if not own:
        return [part] if part.end_ns > part.start_ns else []
    ahead = [
        one for one in timeline.handshakes
        if one.peer != peer and one.process == own[0].process and one.start_ns < own[0].start_ns
    ]  # fmt: skip
    parts: list[Part] = []
    at_ns = part.start_ns
    for one in sorted([*ahead, *own]):
        line = "" if one.peer == peer else f", ahead of {peer}'s"
        begin_ns, stop_ns = max(at_ns, one.start_ns), min(part.end_ns, one.end_ns)
        if stop_ns <= begin_ns:
            continue
        parts.append(part._replace(start_ns=at_ns, end_ns=begin_ns))
        parts.append(Part(begin_ns, stop_ns, stages.HANDSHAKE.name, f"agent metadata of {one.peer}{line}"))
        at_ns = stop_ns
    parts.append(part._replace(start_ns=at_ns))
    return [one for one in parts if one.end_ns > one.start_ns]


def divide_intake(start_ns: int, intake_ns: int, end_ns: int, timeline: Timeline, side: str) -> list[Part]:
    """Divide a request's way into an engine's scheduler: its front end's until it is in the core's queue.

    It came into that queue `intake_ns` before the end, and waits there for the running step and the scheduler's turn.
    """
    boundary, came_ns = f"{side}.step_boundary", max(start_ns, end_ns - intake_ns)
    parts = [Part(start_ns, came_ns, f"{side}.frontend", f"{side}.enqueued")]
    at_ns, before = came_ns, timeline.before(came_ns)
    turn = _turn(before) if before is not None else Turn()
    running = timeline.running(came_ns)
    for step in ([running] if running is not None else []) + timeline.between(came_ns + 1, end_ns):
        begin_ns, stop_ns = max(at_ns, step.scheduled_ns), min(step_end_ns(step), end_ns)
        if stop_ns <= begin_ns:
            continue
        parts.extend(divide_turn(at_ns, begin_ns, turn, boundary))
        parts.append(Part(begin_ns, stop_ns, boundary, f"the end of step {step.step}"))
        at_ns, turn = stop_ns, _turn(step)
    parts.extend(divide_turn(at_ns, end_ns, turn, boundary))
    return [part for part in parts if part.end_ns > part.start_ns]


# Waiting for a place in a step -----------------------------------------------------------------------------


class Wait(NamedTuple):
    """A wait for a place in a step of one engine: its side, and when the scheduler looked at the request (unix ns).

    `looked` is None where nobody says, and empty where the request had its blocks and needed no look. From `at_work_ns`
    on the scheduler was at work on the request, for longer than a look takes.
    """

    timeline: Timeline
    side: str
    looked: Sequence[int] | None = None
    at_work_ns: int = NEVER_NS

    def saw_no_blocks(self, from_ns: int, until_ns: int) -> bool:
        """Return whether the scheduler looked at the request in that time and left it: slot and budget were free."""
        if not self.looked:
            return False
        position = bisect_right(self.looked, until_ns) - 1
        return position >= 0 and self.looked[position] >= from_ns - LOOK_NS


def divide_engine_wait(start_ns: int, end_ns: int, wait: Wait) -> list[Part]:
    """Divide a wait for a place in a step: the step that runs, then steps that passed the request over, then nothing.

    Times in unix ns; the parts tile [start_ns, end_ns).
    """
    timeline, side = wait.timeline, wait.side
    boundary, queue = f"{side}.step_boundary", f"{side}.queue"
    parts: list[Part] = []
    at_ns = start_ns
    turn, turn_cause = Turn(), boundary
    step = timeline.running(start_ns)
    if step is not None:
        stop_ns = min(step_end_ns(step), end_ns)
        parts.append(Part(at_ns, stop_ns, boundary, f"the end of step {step.step}"))
        at_ns = stop_ns
        turn = _turn(step)
    for step in timeline.between(start_ns + 1, end_ns):
        stop_ns = min(step_end_ns(step), end_ns)
        if stop_ns <= at_ns:
            continue
        begin_ns = max(at_ns, step.scheduled_ns)
        cause, reason = _passed_over(step, wait, at_ns)
        parts.extend(_pause(at_ns, begin_ns, turn, cause if turn_cause != boundary else boundary, wait))
        parts.append(Part(begin_ns, stop_ns, cause, reason))
        at_ns, turn_cause = stop_ns, cause
        turn = _turn(step)
    begun_ns = min(max(wait.at_work_ns, at_ns + turn.own_ns + turn.starved_ns), end_ns)
    parts.extend(_pause(at_ns, begun_ns, turn, turn_cause if turn_cause == queue else boundary, wait))
    parts.append(Part(begun_ns, end_ns, boundary, "the scheduler, which was at work on this request"))
    return [part for part in parts if part.end_ns > part.start_ns]


def _passed_over(step: Step, wait: Wait, after_ns: int) -> tuple[str, str]:
    """Return the cause and what was waited for while a step without the request ran: blocks, budget or a slot.

    The scheduler looks at a request only with a slot and tokens to spare, so one that it looked at and left lacked
    blocks; who holds them decides the class.
    """
    side = wait.side
    queue, capacity = f"{side}.queue", f"{side}.capacity"
    if wait.saw_no_blocks(min(after_ns, step.scheduled_ns), step.scheduled_ns):
        held = wait.timeline.occupancy.at(step.scheduled_ns)
        told = _blocks_told(held, side)
        idle = held.waiting > held.computing or not step.tokens
        return (capacity, told) if idle else (queue, told)
    if not step.tokens:
        return capacity, "blocks that no computing request holds"
    if wait.looked is None:
        return queue, f"a place in step {step.step}"
    if any(wait.timeline.limits):
        return queue, _full_told(step, wait.timeline.limits)
    if step.tokens > step.requests:
        taken = f"{plural(step.tokens, 'token')} of {plural(step.requests, 'request')}"
        return queue, f"the token budget: step {step.step} takes {taken}"
    return queue, f"a batch slot: step {step.step} makes tokens of {plural(step.requests, 'request')}"


def _full_told(step: Step, limits: Limits) -> str:
    """Return what a step had no more room for, by the scheduler's own limits."""
    full = (("the token budget", step.tokens >= limits.tokens), ("a batch slot", step.requests >= limits.requests))
    lacked = " and ".join(name for name, is_full in full if is_full) or "a place"
    took = f"{step.tokens} of {limits.tokens} tokens and {step.requests} of {limits.requests} requests"
    return f"{lacked}: step {step.step} takes {took}"


def _blocks_told(held: Held, side: str) -> str:
    if not any(held):
        return "KV blocks"
    others = "finished ones" if side == "prefill" else "those that wait for KV"
    return f"KV blocks: computing requests hold {held.computing}, {others} {held.waiting}"


def _pause(start_ns: int, end_ns: int, turn: Turn, cause: str, wait: Wait) -> list[Part]:
    """Divide a pause between steps: the scheduler's turn, then blocks while the scheduler is seen to look in vain."""
    known, rest = divide_turn(start_ns, end_ns, turn, cause)
    looked = wait.looked
    if not looked or rest.end_ns <= rest.start_ns:
        return [known, rest]
    parts = [known]
    at_ns = rest.start_ns
    for position in range(bisect_right(looked, at_ns - LOOK_NS - TURN_NS), bisect_left(looked, rest.end_ns)):
        looked_ns = looked[position]
        held = wait.timeline.occupancy.at(looked_ns)
        begin_ns, stop_ns = max(at_ns, looked_ns), min(rest.end_ns, looked_ns + LOOK_NS + TURN_NS)
        if stop_ns <= begin_ns or not held.waiting:
            continue
        parts.append(rest._replace(start_ns=at_ns, end_ns=begin_ns))
        told = _blocks_told(held, wait.side)
        parts.append(Part(begin_ns, stop_ns, f"{wait.side}.capacity", told))
        at_ns = stop_ns
    return [*parts, rest._replace(start_ns=at_ns)]


def divide_ride(start_ns: int, end_ns: int, timeline: Timeline, cause: str) -> list[Part]:
    """Divide the time in which an order rides from scheduler to worker: steps and the scheduler's turns are known."""
    parts: list[Part] = []
    at_ns, turn = start_ns, Turn()
    running = timeline.running(start_ns)
    for step in ([running] if running is not None else []) + timeline.between(start_ns + 1, end_ns):
        begin_ns, stop_ns = max(at_ns, step.scheduled_ns), min(step_end_ns(step), end_ns)
        if stop_ns <= at_ns:
            continue
        parts.extend(divide_turn(at_ns, begin_ns, turn, cause))
        parts.append(Part(begin_ns, stop_ns, cause, f"step {step.step}"))
        at_ns = stop_ns
        turn = _turn(step)
    parts.extend(divide_turn(at_ns, end_ns, turn, cause))
    return [part for part in parts if part.end_ns > part.start_ns]


def _turn(step: Step) -> Turn:
    return Turn(TURN_NS if step.tokens else EMPTY_TURN_NS, step.starved_after_ns)


def divide_turn(start_ns: int, end_ns: int, turn: Turn, cause: str) -> list[Part]:
    """Charge a pause between steps to `cause` for as long as the scheduler's own turn may take, the rest to nothing."""
    own_end_ns = start_ns + turn.own_ns
    known_ns = min(end_ns, own_end_ns + turn.starved_ns)
    told = ", for which no processor was free" if known_ns > own_end_ns else ""
    return [
        Part(start_ns, known_ns, cause, f"the scheduler's next turn{told}"),
        Part(known_ns, end_ns, stages.UNKNOWN.name, NO_STEP),
    ]


# A sender thread -------------------------------------------------------------------------------------------


def divide_sender_wait(start_ns: int, end_ns: int, awake: list[Awake], posts: Posts, own: str) -> list[Part]:
    """Divide a wait for a sender thread: asleep although its work has arrived, or awake with something else.

    `posts` are what the thread's process posts, `own` is the request that waits. Of a thread that was never seen to
    wake nothing is known.
    """
    if not awake:
        return [Part(start_ns, end_ns, stages.UNKNOWN.name, "P's sender thread, of which nothing is known")]
    parts: list[Part] = []
    at_ns = start_ns
    for stretch in awake[max(0, bisect_right(awake, start_ns, key=lambda one: one.start_ns) - 1) :]:
        if stretch.start_ns >= end_ns:
            break
        if stretch.end_ns <= at_ns:
            continue
        begin_ns, stop_ns = max(at_ns, stretch.start_ns), min(stretch.end_ns, end_ns)
        parts.append(Part(at_ns, begin_ns, stages.WRITER_WAKE.name, "the sender thread to wake"))
        parts.extend(_busy(begin_ns, stop_ns, posts, own))
        at_ns = stop_ns
    parts.append(Part(at_ns, end_ns, stages.WRITER_WAKE.name, "the sender thread to wake"))
    return [part for part in parts if part.end_ns > part.start_ns]


def _busy(start_ns: int, end_ns: int, posts: Posts, own: str) -> list[Part]:
    other = Part(start_ns, end_ns, stages.WRITER_BUSY.name, "the sender thread's other work")
    parts: list[Part] = []
    for post in posts.during(start_ns, end_ns):
        if post.request_id == own:
            continue
        parts.append(other._replace(end_ns=post.start_ns))
        parts.append(Part(post.start_ns, post.end_ns, stages.WRITER_BUSY.name, f"the post of {post.request_id}"))
        other = other._replace(start_ns=post.end_ns)
    return [*parts, other]
