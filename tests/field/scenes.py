"""Scenes that several field reports need, and how to change the one event that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvtrace import stages
from kvtrace.model import Attribution, Event, Process
from tests.trace import MS, PROCESSES, D, P, Trace, pull

P_LEG, D_LEG = "cmpl-r1-0-aaaaaaaa", "cmpl-r1-0-bbbbbbbb"
STAND_IN = "8f14e45fceea167a5a36dedd4bea2543"
"""What vLLM calls what it adds on D in the place of a refused request: an id made of nothing."""
P1, D1 = 6, 7
"""The workers of rank 1, where an engine has two ranks; `P` and `D` are then those of rank 0."""


def ranks(prefill: int, decode: int) -> dict[int, Process]:
    """Return the processes of a pair of engines with so many tensor-parallel ranks."""
    processes = dict(PROCESSES)
    for process, engine, width in ((P, "engine-p", prefill), (D, "engine-d", decode)):
        processes[process] = Process(process, "core", engine, "host-a", tp_size=width)
    for process, engine, width in ((P1, "engine-p", prefill), (D1, "engine-d", decode)):
        if width > 1:
            processes[process] = Process(process, "worker", engine, "host-a", tp_size=width)
    return processes


def changed(trace: Trace, stage: stages.Stage, which: Callable[[Event], bool] = lambda _: True, **fields: Any) -> Trace:
    """Return a copy in which the events of a stage have other values."""
    copy = Trace()
    copy.events = [
        event._replace(**fields) if event.stage == stage.name and which(event) else event for event in trace.events
    ]
    return copy


def lacking(trace: Trace, which: Callable[[Event], bool]) -> Trace:
    """Return a copy without the events that `which` picks."""
    copy = Trace()
    copy.events = [event for event in trace.events if not which(event)]
    return copy


def renamed(trace: Trace, names: Mapping[str, str]) -> Trace:
    """Return a copy in which requests have other ids, also where others name them."""
    copy = Trace()
    copy.events = [
        event._replace(request=names.get(event.request, event.request), ref=names.get(event.ref, event.ref))
        for event in trace.events
    ]
    return copy


def carrying(trace: Trace, prefill: str, decode: str) -> Trace:
    """Return a copy whose legs were sent these transfer_ids."""
    trace = changed(trace.at(3.6, stages.PREFILL_ALLOCATED, P_LEG, 38), stages.PREFILL_ALLOCATED, ref=prefill)
    return changed(trace, stages.DECODE_ALLOCATED, ref=decode)


def unanswered(trace: Trace) -> Trace:
    """Return a copy in which D was never ready and nothing came out."""
    return trace.without(
        "decode.ready", "decode.reported", "decode.scheduled", "decode.first_token_out", "router.first_token",
        "decode.finished", "router.done",
    )  # fmt: skip


def engines_only(trace: Trace) -> Trace:
    """Return a copy as of a deployment whose router is not instrumented."""
    return lacking(trace, lambda event: event.stage.startswith("router."))


def by_id(trace: Trace, processes: dict[int, Process] | None = None) -> dict[str, Attribution]:
    """Return the answers of a trace by request id."""
    return {answer.request.request_id: answer for answer in trace.answers(processes)}


def going_on(trace: Trace, process: int, until_ms: float) -> Trace:
    """Add a step of that engine for somebody else, long after."""
    return trace.step(process, 999, (until_ms - 4, until_ms - 3, until_ms - 1, until_ms - 1, until_ms))


def two_ranks() -> Trace:
    """Return a pull of two ranks a side: rank 0 as in `pull`, rank 1 posts at 39..40 and sees its KV at 63.

    Rank 1 reports at 64 and D's scheduler is ready at 65: everything from there on comes 20 ms later than in `pull`.
    """
    trace = pull().shifted(44.5, 20)
    trace.at(38, stages.LOAD_STARTED, D_LEG, 1, 38, process=D1)
    trace.at(38.5, stages.PREPARED, D_LEG, 3, 20, 1, ref=P_LEG, process=D1)
    trace.at(39, stages.POST_STARTED, D_LEG, 3, process=D1)
    trace.at(40, stages.POST_ENDED, D_LEG, 3, 1_300_000, 20, 0, process=D1)
    trace.at(63, stages.TRANSFER_DONE, D_LEG, 3, process=D1)
    return trace.at(64, stages.REPORTED, D_LEG, 1, process=D1)


def passed_over(looked_ms: tuple[float, ...] = (), *, tokens: int = 16, requests: int = 16) -> Trace:
    """Return a pull whose D leg, there at 36, has its blocks only at 67: D's step 5 (36.2..66) leaves it waiting.

    `looked_ms` are the times at which D's scheduler looked at the request in vain.
    """
    trace = pull().shifted(36.5, 30)
    trace.step(D, 5, (36.2, 36.5, 64, 65, 66), tokens=tokens, requests=requests)
    for at_ms in (*looked_ms, 66.9):
        trace.at(at_ms, stages.DECODE_CONSIDERED, D_LEG, 0, 599)
    return trace


def occupant(name: str, blocks: int, *, waits: bool, process: int = D) -> Trace:
    """Return a request that holds blocks on D from 10 on: waiting for KV, or computing."""
    return Trace().at(10, stages.DECODE_ALLOCATED, name, blocks, 599 if waits else 0, process=process)


def repeated(trace: Trace, *others: Trace) -> Trace:
    """Return one trace with the events of all."""
    whole = Trace()
    for one in (trace, *others):
        whole.events += one.events
    return whole


def total_ms(answer: Attribution) -> float:
    """Return the time to first token in ms."""
    assert answer.ttft_ns is not None
    return answer.ttft_ns / MS


def waited_ms(answer: Attribution, cause: str) -> dict[str, float]:
    """Return how long the path waited under one cause, by what for, in ms."""
    found: dict[str, float] = {}
    for segment in answer.segments:
        if segment.cause == cause:
            found[segment.waited_for] = found.get(segment.waited_for, 0) + (segment.end_ns - segment.start_ns) / MS
    return found
