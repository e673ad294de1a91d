"""Copies between a device and the host buffer that NIXL reads and writes: when they were, and what they divide."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace import stages
from kvtrace.division import Part
from kvtrace.evidence import Posts, Timeline
from kvtrace.model import Event, Posted, Request

COPY_STAGES = frozenset(
    stage.name
    for stage in (
        stages.PREFILL_COPY_STARTED, stages.PREFILL_COPIED, stages.DECODE_COPY_STARTED, stages.DECODE_COPIED
    )
)  # fmt: skip
_SIDES = (
    (stages.PREFILL_COPY_STARTED.name, stages.PREFILL_COPIED.name),
    (stages.DECODE_COPY_STARTED.name, stages.DECODE_COPIED.name),
)
TO_HOST = "P's copy from the device to its host buffer"
TO_DEVICE = "D's copy from its host buffer to the device"


def copied(requests: Iterable[Request]) -> dict[int, Posts]:
    """Return per process the copies to and from its host buffer. A copy of which an end was not recorded is none."""
    found: dict[int, list[Posted]] = {}
    for request in requests:
        for started, ended in _SIDES:
            if ended in request.events:
                for span in _spans(request.events.get(started, ()), request.events[ended], request.request_id):
                    found.setdefault(span.process, []).append(span)
    return {process: Posts(spans) for process, spans in found.items()}


def _spans(started: Iterable[Event], ended: Iterable[Event], name: str) -> Iterable[Posted]:
    """Yield the copies of one request on one side: one thread of each process makes them one after the other."""
    stamps = [(one.process, one.t_ns, True) for one in started] + [(one.process, one.t_ns, False) for one in ended]
    begun: tuple[int, int] | None = None
    for process, t_ns, is_start in sorted(stamps):  # of one moment an end comes first: the next one may begin there
        if is_start:
            begun = (process, t_ns)
        elif begun is not None and begun[0] == process:
            yield Posted(begun[1], t_ns, name, process)
            begun = None


def divide_save(parts: list[Part], request: Request, done: Posts) -> list[Part]:
    """Divide P's own steps: the connector's work behind a forward is a copy while one is under way."""
    return _divided(parts, stages.STEP_CONNECTOR.name, request, done, TO_HOST)


def divide_load(part: Part, request: Request, done: Posts, timeline: Timeline) -> list[Part]:
    """Divide the time until D's worker reports the KV: its copy, once the forward before it on the device has ended."""
    parts: list[Part] = []
    for one in _divided([part], part.cause, request, done, TO_DEVICE):
        step = timeline.forwarded_in(one.start_ns, one.end_ns) if one.cause == stages.HOST_COPY.name else None
        if step is None:
            parts.append(one)
            continue
        behind = f"the forward of step {step.step}, behind which D copies"
        parts.append(part._replace(start_ns=one.start_ns, end_ns=step.forwarded_ns, waited_for=behind))
        parts.append(one._replace(start_ns=step.forwarded_ns))
    return [one for one in parts if one.end_ns > one.start_ns]


def _divided(parts: list[Part], cause: str, request: Request, done: Posts, told: str) -> list[Part]:
    """Divide the parts of one cause by the copies of a process: the request's own, and others' ahead of it."""
    found: list[Part] = []
    for part in parts:
        at_ns = part.start_ns
        for span in done.during(part.start_ns, part.end_ns) if part.cause == cause else ():
            found.append(part._replace(start_ns=at_ns, end_ns=span.start_ns))
            if span.request_id == request.request_id:
                found.append(Part(span.start_ns, span.end_ns, stages.HOST_COPY.name, told))
            else:
                found.append(Part(span.start_ns, span.end_ns, cause, f"the copy of {span.request_id}"))
            at_ns = span.end_ns
        found.append(part._replace(start_ns=at_ns))
    return [part for part in found if part.end_ns > part.start_ns]
