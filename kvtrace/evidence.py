"""What else was going on: engine steps and sender threads, and how they divide a wait into causes.

A wait is charged to something only while that something is known to be outstanding; the rest is unattributed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvtrace import stages
from kvtrace.model import Awake, Event, Process, Step

# Between two steps the scheduler takes in results and makes up the next step; after a step without work vLLM's loop
# sleeps one millisecond, from which a busy Linux wakes it up to a time slice (3 ms) late. Longer pauses are nobody's.
TURN_NS = 1_000_000
EMPTY_TURN_NS = 4_000_000


class Part(NamedTuple):
    """A stretch of a wait with its cause: start and end in unix ns, the cause's name, what was waited for."""

    start_ns: int
    end_ns: int
    cause: str
    waited_for: str


class Timeline:
    """The steps of one engine in order, the sender threads of its workers, its handshakes as (start, end, peer)."""

    def __init__(
        self,
        steps: Iterable[Step] = (),
        senders: Mapping[int, list[Awake]] | None = None,
        handshakes: Iterable[tuple[int, int, str]] = (),
    ) -> None:
        self.steps = sorted(steps, key=lambda step: step.scheduled_ns)
        self.by_number = {step.step: step for step in self.steps}
        self.senders = dict(senders or {})
        self.handshakes = sorted(handshakes)
        self._scheduled = [step.scheduled_ns for step in self.steps]

    def between(self, start_ns: int, end_ns: int) -> list[Step]:
        """Return the steps made up in [start_ns, end_ns)."""
        return self.steps[bisect_left(self._scheduled, start_ns) : bisect_left(self._scheduled, end_ns)]

    def running(self, at_ns: int) -> Step | None:
        """Return the last step made up at or before `at_ns` that had not ended then, None if there was none."""
        position = bisect_right(self._scheduled, at_ns) - 1
        for step in reversed(self.steps[max(0, position - 1) : position + 1]):
            if step.scheduled_ns <= at_ns < step_end_ns(step):
                return step
        return None

    def sender(self, process: int) -> list[Awake]:
        """Return when that worker's sender thread was awake, in order."""
        return self.senders.get(process, [])


def step_end_ns(step: Step) -> int:
    """Return when the step was over: taken in by the scheduler, else the latest that is known of it. Unix ns."""
    return step.ended_ns or max(step.connected_ns, step.forwarded_ns, step.started_ns, step.scheduled_ns)


def timelines(events: Iterable[Event], processes: Mapping[int, Process]) -> dict[str, Timeline]:
    """Return per engine id its steps and sender threads, from all events of a run."""
    raw: dict[str, dict[int, dict[str, list[Event]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    senders: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    handshakes: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        process = processes.get(event.process)
        if process is None:
            continue
        if event.stage.startswith("step."):
            raw[process.engine][event.a][event.stage].append(event)
        elif event.stage.startswith("sender.") and event.stage != stages.SENDER_PICKED.name:
            senders[process.engine][event.process].append(event)
        elif event.stage.startswith("handshake."):
            handshakes[process.engine].append(event)
    engines = set(raw) | set(senders) | set(handshakes)
    return {
        engine: Timeline(
            [_step(number, found) for number, found in raw[engine].items() if found],
            {process: _awake(seen) for process, seen in senders[engine].items()},
            _handshakes(handshakes[engine]),
        )
        for engine in engines
    }


def _step(number: int, found: Mapping[str, list[Event]]) -> Step:
    def last(stage: stages.Stage) -> int:
        return max((event.t_ns for event in found.get(stage.name, ())), default=0)

    scheduled = found.get(stages.STEP_SCHEDULED.name, ())
    started = found.get(stages.STEP_STARTED.name, ())
    connected = found.get(stages.STEP_CONNECTED.name, ())
    slowest = max(connected, key=lambda event: event.c, default=None)
    first_ns = min((event.t_ns for events in found.values() for event in events), default=0)
    return Step(
        step=number,
        scheduled_ns=scheduled[0].t_ns if scheduled else first_ns,
        started_ns=min((event.t_ns for event in started), default=0),
        forwarded_ns=last(stages.STEP_FORWARDED),
        connected_ns=last(stages.STEP_CONNECTED),
        ended_ns=last(stages.STEP_ENDED),
        connector_ns=slowest.c if slowest is not None else 0,
        before_forward_ns=slowest.d if slowest is not None else 0,
        tokens=scheduled[0].b if scheduled else 0,
        requests=scheduled[0].c if scheduled else 0,
    )


def _awake(seen: list[Event]) -> list[Awake]:
    stretches: list[Awake] = []
    woke: Event | None = None
    for event in sorted(seen):
        if event.stage == stages.SENDER_WOKE.name:
            woke = event
        elif woke is not None:
            stretches.append(Awake(woke.t_ns, event.t_ns, woke.t_ns - woke.c if woke.c else 0))
            woke = None
    if woke is not None:
        stretches.append(Awake(woke.t_ns, 2**63 - 1, woke.t_ns - woke.c if woke.c else 0))
    return stretches


def _handshakes(seen: list[Event]) -> list[tuple[int, int, str]]:
    """Return (start, end, peer engine) of every handshake of one engine; one that never ended ends with time."""
    spans = []
    begun: dict[tuple[int, str], int] = {}
    for event in sorted(seen):
        key = (event.process, event.ref)
        if event.stage == stages.HANDSHAKE_STARTED.name:
            begun.setdefault(key, event.t_ns)
        elif key in begun:
            spans.append((begun.pop(key), event.t_ns, event.ref))
    return spans + [(start_ns, 2**63 - 1, peer) for (_, peer), start_ns in begun.items()]


def divide_by_handshake(part: Part, timeline: Timeline, peer: str) -> list[Part]:
    """Divide a stretch by the engine's handshakes with that peer: while one is under way, that is the cause."""
    parts: list[Part] = []
    at_ns = part.start_ns
    for start_ns, end_ns, engine in timeline.handshakes:
        begin_ns, stop_ns = max(at_ns, start_ns), min(part.end_ns, end_ns)
        if engine != peer or stop_ns <= begin_ns:
            continue
        parts.append(part._replace(start_ns=at_ns, end_ns=begin_ns))
        parts.append(Part(begin_ns, stop_ns, stages.HANDSHAKE.name, f"agent metadata of {peer}"))
        at_ns = stop_ns
    parts.append(part._replace(start_ns=at_ns))
    return [one for one in parts if one.end_ns > one.start_ns]


# Dividing a wait -----------------------------------------------------------------------------------------


def divide_engine_wait(start_ns: int, end_ns: int, timeline: Timeline, side: str) -> list[Part]:
    """Divide a wait for a place in a step: the step that runs, then steps that passed the request over, then nothing.

    Times in unix ns; the parts tile [start_ns, end_ns).
    """
    boundary, queue, capacity = f"{side}.step_boundary", f"{side}.queue", f"{side}.capacity"
    parts: list[Part] = []
    at_ns = start_ns
    turn_ns, passed_over = TURN_NS, False
    step = timeline.running(start_ns)
    if step is not None:
        stop_ns = min(step_end_ns(step), end_ns)
        parts.append(Part(at_ns, stop_ns, boundary, f"the end of step {step.step}"))
        at_ns = stop_ns
        turn_ns = TURN_NS if step.tokens else EMPTY_TURN_NS
    for step in timeline.between(start_ns + 1, end_ns):
        stop_ns = min(step_end_ns(step), end_ns)
        if stop_ns <= at_ns:
            continue
        cause, reason = (
            (queue, f"a place in step {step.step}")
            if step.tokens
            else (capacity, "blocks that no computing request holds")
        )
        begin_ns = max(at_ns, step.scheduled_ns)
        parts.extend(divide_turn(at_ns, begin_ns, turn_ns, cause if passed_over else boundary))
        parts.append(Part(begin_ns, stop_ns, cause, reason))
        at_ns, passed_over = stop_ns, True
        turn_ns = TURN_NS if step.tokens else EMPTY_TURN_NS
    parts.extend(divide_turn(at_ns, end_ns, turn_ns, (queue if parts and parts[-1].cause == queue else boundary)))
    return [part for part in parts if part.end_ns > part.start_ns]


def divide_ride(start_ns: int, end_ns: int, timeline: Timeline, cause: str) -> list[Part]:
    """Divide the time in which an order rides from scheduler to worker: steps and the scheduler's turns are known."""
    parts: list[Part] = []
    at_ns, turn_ns = start_ns, TURN_NS
    running = timeline.running(start_ns)
    for step in ([running] if running is not None else []) + timeline.between(start_ns + 1, end_ns):
        begin_ns, stop_ns = max(at_ns, step.scheduled_ns), min(step_end_ns(step), end_ns)
        if stop_ns <= at_ns:
            continue
        parts.extend(divide_turn(at_ns, begin_ns, turn_ns, cause))
        parts.append(Part(begin_ns, stop_ns, cause, f"step {step.step}"))
        at_ns = stop_ns
        turn_ns = TURN_NS if step.tokens else EMPTY_TURN_NS
    parts.extend(divide_turn(at_ns, end_ns, turn_ns, cause))
    return [part for part in parts if part.end_ns > part.start_ns]


def divide_turn(start_ns: int, end_ns: int, turn_ns: int, cause: str) -> list[Part]:
    """Charge a pause between steps to `cause` for as long as the scheduler's own turn may take, the rest to nothing."""
    known_ns = min(end_ns, start_ns + turn_ns)
    return [
        Part(start_ns, known_ns, cause, "the scheduler's next turn"),
        Part(known_ns, end_ns, stages.UNKNOWN.name, "nothing that was recorded"),
    ]


def divide_steps(
    begun_ns: int, computed_ns: int, own: list[tuple[Step, bool]], timeline: Timeline, side: str
) -> list[Part]:
    """Divide the time from the first to the last of a request's own steps. `own` holds (step, works on the prompt).

    Own steps are compute, the way from scheduler to worker is launch, steps in between are others', pauses are nothing.
    """
    forward = f"{side}.forward" if side == "prefill" else ""
    launch, sample, others = f"{side}.launch", f"{side}.sample", f"{side}.others"
    parts: list[Part] = []
    at_ns = begun_ns
    for position, (step, is_prompt) in enumerate(own):
        last = position == len(own) - 1
        run = forward or (stages.DECODE_PREFILL.name if is_prompt else stages.FIRST_STEP.name)
        if step.scheduled_ns > at_ns:
            parts.extend(_others(at_ns, min(step.scheduled_ns, computed_ns), timeline, others))
            at_ns = step.scheduled_ns
        started_ns = step.started_ns or step.scheduled_ns
        forwarded_ns = computed_ns if last else step.forwarded_ns or step_end_ns(step)
        parts.append(Part(at_ns, min(max(at_ns, started_ns), computed_ns), launch, f"the start of step {step.step}"))
        at_ns = min(max(at_ns, started_ns), computed_ns)
        if not last and step.before_forward_ns:
            parts.append(
                Part(
                    at_ns,
                    at_ns + step.before_forward_ns,
                    stages.STEP_CONNECTOR.name,
                    f"the connector in step {step.step}",
                )
            )
            at_ns += step.before_forward_ns
        parts.append(Part(at_ns, min(max(at_ns, forwarded_ns), computed_ns), run, f"step {step.step}"))
        at_ns = min(max(at_ns, forwarded_ns), computed_ns)
        if not last:
            tail_end_ns = min(step_end_ns(step), own[position + 1][0].scheduled_ns, computed_ns)
            if tail_end_ns > at_ns:
                parts.extend(divide_tail(at_ns, tail_end_ns, step, sample))
                at_ns = tail_end_ns
    if at_ns < computed_ns:
        parts.append(Part(at_ns, computed_ns, stages.UNKNOWN.name, "nothing that was recorded"))
    return [part for part in parts if part.end_ns > part.start_ns]


def _others(start_ns: int, end_ns: int, timeline: Timeline, cause: str) -> list[Part]:
    parts: list[Part] = []
    at_ns = start_ns
    for step in timeline.between(start_ns, end_ns):
        if not step.tokens:
            continue
        stop_ns = min(step_end_ns(step), end_ns)
        if stop_ns <= at_ns:
            continue
        begin_ns = max(at_ns, step.scheduled_ns)
        parts.extend(divide_turn(at_ns, begin_ns, TURN_NS, cause))
        parts.append(Part(begin_ns, stop_ns, cause, f"step {step.step}, which works on others"))
        at_ns = stop_ns
    parts.extend(divide_turn(at_ns, end_ns, TURN_NS, cause))
    return parts


def divide_tail(start_ns: int, end_ns: int, step: Step | None, sample: str) -> list[Part]:
    """Divide the time after a step's forward: the connector on the forward thread, sampling and taking in."""
    if step is None:
        return [Part(start_ns, end_ns, sample, "the step's result")]
    connected_ns = min(max(step.connected_ns, start_ns), end_ns)
    after_forward_ns = max(0, step.connector_ns - step.before_forward_ns)
    connector_start_ns = max(start_ns, connected_ns - after_forward_ns)
    parts = [
        Part(start_ns, connector_start_ns, sample, "the step's result"),
        Part(connector_start_ns, connected_ns, stages.STEP_CONNECTOR.name, f"the connector in step {step.step}"),
        Part(connected_ns, end_ns, sample, "the step's result"),
    ]
    return [part for part in parts if part.end_ns > part.start_ns]


def divide_sender_wait(start_ns: int, end_ns: int, awake: list[Awake]) -> list[Part]:
    """Divide a wait for a sender thread: asleep although its work has arrived, or awake with something else."""
    parts: list[Part] = []
    at_ns = start_ns
    for stretch in awake[max(0, bisect_right(awake, start_ns, key=lambda one: one.start_ns) - 1) :]:
        if stretch.start_ns >= end_ns:
            break
        if stretch.end_ns <= at_ns:
            continue
        begin_ns, stop_ns = max(at_ns, stretch.start_ns), min(stretch.end_ns, end_ns)
        parts.append(Part(at_ns, begin_ns, stages.WRITER_WAKE.name, "the sender thread to wake"))
        parts.append(Part(begin_ns, stop_ns, stages.WRITER_BUSY.name, "the sender thread's other work"))
        at_ns = stop_ns
    parts.append(Part(at_ns, end_ns, stages.WRITER_WAKE.name, "the sender thread to wake"))
    return [part for part in parts if part.end_ns > part.start_ns]
