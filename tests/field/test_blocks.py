"""Waiting for KV blocks: who holds them decides whose wait it is."""

from __future__ import annotations

import pytest

from kvtrace import division, stages
from kvtrace.evidence import Timeline
from kvtrace.model import Attribution, Step
from kvtrace.occupancy import Held, Occupancy, Span
from tests.field.scenes import (
    D_LEG,
    P_LEG,
    occupant,
    passed_over,
    repeated,
    waited_ms,
)
from tests.trace import MS, D, Trace, causes_ms, pull, push


def test_who_holds_the_blocks_decides_the_class() -> None:
    """Design: blocks of computing requests are compute, blocks of requests that wait for KV are coordination."""
    scene = passed_over((36.1,))
    computing, waiting = (
        next(a for a in repeated(scene, occupant("o", 900, waits=waits)).answers() if a.segments)
        for waits in (False, True)
    )

    # and the scheduler's turn of 1 ms behind it
    assert causes_ms(waiting)["decode.capacity"] == pytest.approx(29.8)
    assert causes_ms(computing)["decode.queue"] == pytest.approx(30.8)
    assert waiting.shares_ns["coordination"] - computing.shares_ns["coordination"] == pytest.approx(30.8 * MS)


def _long_wait(*, waits: bool) -> Trace:
    """Return a request that has its blocks on D after 114 s of steps that compute for others, which hold 970 blocks."""
    trace = pull().shifted(36.5, 114_000)
    for number in range(114):
        at = 37.0 + 1_000 * number
        trace.step(D, 1_000 + number, (at, at + 1, at + 980, at + 990, at + 999.8), tokens=16, requests=16)
        trace.at(at - 0.1, stages.DECODE_CONSIDERED, D_LEG)
    return repeated(trace, occupant("o", 970, waits=waits))


def test_a_short_prompt_waits_for_ds_blocks_and_not_for_the_network() -> None:
    """Public gist of an agentic workload: D's KV is full, and a request of 49 tokens waits for 114 s."""
    computing, waiting = (next(a for a in _long_wait(waits=waits).answers() if a.segments) for waits in (False, True))

    assert causes_ms(computing)["decode.queue"] == pytest.approx(114_000, rel=0.01)
    assert computing.shares_ns["compute.queue"] > 0.99 * (computing.ttft_ns or 0)
    assert computing.shares_ns["transfer"] == 4 * MS
    assert causes_ms(waiting)["decode.capacity"] == pytest.approx(114_000, rel=0.01)


class _Counted(Occupancy):
    """Counts how often it is asked."""

    asked = 0

    def at(self, t_ns: int) -> Held:
        self.asked += 1
        return super().at(t_ns)


@pytest.mark.parametrize("turn_ms", [0.2, 3.0], ids=["no pauses", "pauses"])
def test_a_long_wait_is_worked_out_in_one_pass(turn_ms: float) -> None:
    """500 steps of 20 ms, a look before each: who holds the blocks is asked for each, not for every pair of them."""
    steps = [Step(n, 20 * n * MS, 0, 0, 0, round((20 * n + 20 - turn_ms) * MS), 0, 0, 16, 16) for n in range(500)]
    held = _Counted([Span(0, 10**18, 970, computes=False)])
    looked = [step.scheduled_ns - MS // 10 for step in steps[1:]]
    wait = division.Wait(Timeline(steps, held=held), "decode", looked)
    parts = division.divide_engine_wait(5 * MS, 10_000 * MS, wait)

    assert held.asked <= 3 * len(steps)
    assert sum(part.end_ns - part.start_ns for part in parts) == 9_995 * MS
    assert sum(part.cause == "unattributed" for part in parts) == (500 if turn_ms > 1 else 0)


def _late_allocation(*looked_ms: float) -> Trace:
    """Return a push whose D has no blocks until 70: P, done at 31, waits for the registration."""
    trace = push(74).shifted(3.4, 66.5, only=["decode.allocated"])
    trace = trace.shifted(3.7, 70, only=["decode.registration_queued"])
    for at_ms in looked_ms:
        trace.at(at_ms, stages.DECODE_CONSIDERED, D_LEG)
    return repeated(trace, occupant("o", 900, waits=True))


def test_memory_pressure_on_d_is_not_ps_fault() -> None:
    """sglang#6351. D looks for blocks in vain at 40, 50 and 60; nobody looking, all that is known is the lateness."""
    short, unseen = (
        next(a for a in trace.answers() if a.segments) for trace in (_late_allocation(40, 50, 60), _late_allocation())
    )

    plain = _on_p(push().answer())
    assert causes_ms(short)["decode.capacity"] == 30
    assert _on_p(short) == _on_p(unseen) == plain
    assert waited_ms(unseen, "registration.late") == {
        "blocks on D": 36, "D's step to carry the registration to its worker": pytest.approx(3.8),
        "D's sender thread": pytest.approx(0.2), "D's registration, on its way": 1,
    }  # fmt: skip
    assert "decode.capacity" not in causes_ms(unseen)


def _on_p(answer: Attribution) -> dict[str, float]:
    """Return what the request waited for on P, its sender thread's wait for a match apart."""
    return {name: ms for name, ms in causes_ms(answer).items() if name.startswith(("prefill.", "stage."))}


def test_blocks_that_computing_requests_hold_on_d_are_its_queue() -> None:
    """The same with steps of D that compute for others, which hold the blocks: D's queue, and nothing on P."""
    trace = push(74).shifted(3.4, 66.5, only=["decode.allocated"]).shifted(3.7, 70, only=["decode.registration_queued"])
    for number in range(3):
        at_ms = 36.0 + 10 * number
        trace.step(D, 20 + number, (at_ms, at_ms + 1, at_ms + 9, at_ms + 9.5, at_ms + 10), tokens=16, requests=16)
        trace.at(at_ms - 0.1, stages.DECODE_CONSIDERED, D_LEG)
    holders = {waits: occupant("o", 900, waits=waits) for waits in (False, True)}
    computing, waiting = (next(a for a in repeated(trace, one).answers() if a.segments) for one in holders.values())

    # and the scheduler's turn of 1 ms behind the last
    assert causes_ms(computing)["decode.queue"] == 31
    assert "decode.queue" not in causes_ms(waiting)
    assert _on_p(computing) == _on_p(push().answer())


def _queued(name: str, at_ms: float, *looked_ms: float) -> Trace:
    """Return a request in D's queue at which D's scheduler looks in vain."""
    trace = Trace().at(at_ms, stages.DECODE_ENQUEUED, name, 600, 0, 1, process=D)
    for look_ms in looked_ms:
        trace.at(look_ms, stages.DECODE_CONSIDERED, name, 0, 599, process=D)
    return trace


def test_those_behind_one_that_gets_no_blocks_wait_for_blocks_too() -> None:
    """Seen on engines: only the first in D's queue is looked at, and those behind it lack blocks as much."""
    scene = _late_allocation()
    ahead, behind = (
        next(a for a in repeated(scene, _queued("q", at_ms, 40, 50, 60)).answers() if a.segments) for at_ms in (2.5, 39)
    )

    assert causes_ms(ahead)["decode.capacity"] == 30
    assert "decode.capacity" not in causes_ms(behind), "one that came later is not ahead"
    got = _queued("q", 2.5, 40).at(40.1, stages.DECODE_ALLOCATED, "q", 5, 599, process=D)
    (served,) = (a for a in repeated(scene, got).answers() if a.segments)
    assert "decode.capacity" not in causes_ms(served), "a look that led to blocks was not in vain"


def _but(*wanted: stages.Stage) -> list[str]:
    return [stage.name for stage in stages.STAGES if stage not in wanted]


def test_finished_requests_hold_blocks_on_p() -> None:
    """What a lease keeps on P while nothing computes is coordination, and named; without a lease nobody is to blame."""
    trace = push().shifted(3.9, 20, only=_but(stages.DECODE_ALLOCATED, stages.REGISTRATION_QUEUED))
    for at_ms in (3.1, 13.2, 23.3):
        trace.at(at_ms, stages.PREFILL_CONSIDERED, P_LEG)
    lease = Trace().at(1, stages.PREFILL_ALLOCATED, "o", 900).at(2, stages.PREFILL_FINISHED, "o", 900, 1)
    held, free = (next(a for a in repeated(trace, *others).answers() if a.segments) for others in ((lease,), ()))

    assert causes_ms(held)["prefill.capacity"] == pytest.approx(20, abs=0.2)
    assert "prefill.capacity" not in causes_ms(free)
