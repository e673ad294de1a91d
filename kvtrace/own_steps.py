"""How the steps that work on a request divide: forwards, the connector, results, others' steps in between.

A thread computes only while it has a processor: what the kernel says that it had none is no compute.
"""

from __future__ import annotations

from kvtrace import stages
from kvtrace.division import Part, Turn, divide_turn
from kvtrace.evidence import Timeline, step_end_ns
from kvtrace.model import Step


def divide_steps(
    begun_ns: int, computed_ns: int, own: list[tuple[Step, bool]], timeline: Timeline, side: str
) -> list[Part]:
    """Divide the time from the first to the last of a request's own steps. `own` holds (step, works on the prompt).

    Own steps are compute but for the connector before their forward, the way from scheduler to worker is launch, steps
    in between are others', pauses are nothing.
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
        began_ns = min(at_ns + max(step.before_forward_ns, 0), computed_ns)
        parts.append(Part(at_ns, began_ns, stages.STEP_CONNECTOR.name, f"the connector in step {step.step}"))
        at_ns = began_ns
        stop_ns = min(max(at_ns, forwarded_ns), computed_ns)
        parts.extend(divide_by_processor(Part(at_ns, stop_ns, run, f"step {step.step}"), step.forward_starved_ns, step))
        at_ns = stop_ns
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
        parts.extend(divide_turn(at_ns, begin_ns, Turn(starved_ns=step.starved_ns), cause))
        parts.append(Part(begin_ns, stop_ns, cause, f"step {step.step}, which works on others"))
        at_ns = stop_ns
    parts.extend(divide_turn(at_ns, end_ns, Turn(), cause))
    return parts


def divide_tail(start_ns: int, end_ns: int, step: Step | None, sample: str) -> list[Part]:
    """Divide the time after a step's forward: the connector on the forward thread, sampling and taking in."""
    if step is None:
        return [Part(start_ns, end_ns, sample, "the step's result")]
    connected_ns = min(max(step.connected_ns, start_ns), end_ns)
    after_forward_ns = max(0, step.connector_ns - step.before_forward_ns)
    connector_start_ns = max(start_ns, connected_ns - after_forward_ns)
    connector = Part(connector_start_ns, connected_ns, stages.STEP_CONNECTOR.name, f"the connector in step {step.step}")
    # What was counted until the step's end may lie behind this end: as much as fits there.
    starved_ns = step.result_starved_ns - max(0, step_end_ns(step) - end_ns)
    parts = [
        Part(start_ns, connector_start_ns, sample, "the step's result"),
        *divide_by_processor(connector, step.connector_starved_ns, step),
        *divide_by_processor(Part(connected_ns, end_ns, sample, "the step's result"), starved_ns, step),
    ]
    return [part for part in parts if part.end_ns > part.start_ns]


def divide_by_processor(part: Part, starved_ns: int, step: Step) -> list[Part]:
    """Divide a worker's part of a step: for so long, ns, its thread had no processor."""
    return without_processor(part, starved_ns, f"a processor for the thread that works on step {step.step}")


def without_processor(part: Part, starved_ns: int, waited_for: str) -> list[Part]:
    """Divide what a thread does: for so long, ns, it had no processor. When is not known: it is laid at the end."""
    begin_ns = max(part.start_ns, part.end_ns - max(0, starved_ns))
    waiting = Part(begin_ns, part.end_ns, stages.PROCESSOR_WAIT.name, waited_for)
    return [one for one in (part._replace(end_ns=begin_ns), waiting) if one.end_ns > one.start_ns]
