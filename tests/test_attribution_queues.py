"""The reference walk where a request waits behind others: in a core's queue, for a step, between its chunks."""

from __future__ import annotations

import pytest

from kvtrace import stages
from tests.trace import MS, D, P, causes_ms, push


@pytest.mark.parametrize(("waited_ms", "boundary_ms", "unknown_ms"), [(0, 0, 0), (0.9, 0, 0), (10, 10, 0), (30, 21, 9)])
def test_who_waits_in_the_cores_queue_waits_for_the_step_that_runs(
    waited_ms: float, boundary_ms: float, unknown_ms: float
) -> None:
    """P works on others from 13 to 33 while the request waits to be taken in at 33: that is not its front end.

    Nor is it while no step runs, from 3 to 13: of that a millisecond may be the scheduler's turn, the rest is nobody's.
    """
    before = causes_ms(push().answer())
    trace = push().shifted(2.8, 30).step(P, 77, (13, 14, 31, 32, 33), tokens=500)
    trace.events = [e._replace(d=round(waited_ms * MS)) if e.stage == "prefill.enqueued" else e for e in trace.events]
    causes = causes_ms(trace.answer())

    assert causes["prefill.step_boundary"] == pytest.approx(before["prefill.step_boundary"] + boundary_ms)
    assert causes["prefill.frontend"] == pytest.approx(before["prefill.frontend"] + 30 - boundary_ms - unknown_ms)
    assert causes.get("unattributed", 0) == pytest.approx(unknown_ms)


@pytest.mark.parametrize("waited_ms", [0.9, 20, 100])
def test_a_registration_that_waits_in_ds_core_is_not_its_front_ends(waited_ms: float) -> None:
    """P has computed at 30; D's leg, sent at 40, is at D's server at 41 and is taken in by its core at 71."""
    trace = push(75).shifted(1, 39, only=["router.decode_sent", "decode.http_received"])
    trace = trace.shifted(3, 68, only=["decode.enqueued"]).shifted(3, 68, only=["decode.allocated"])
    trace.events = [e._replace(d=round(waited_ms * MS)) if e.stage == "decode.enqueued" else e for e in trace.events]
    answer = trace.answer()
    told = {one.waited_for: (one.end_ns - one.start_ns) / MS for one in answer.segments if "late" in one.cause}
    in_core_ms = {0.9: 0, 20: 20, 100: 30}[waited_ms]

    assert told.get("D's front end", 0) == 30 - in_core_ms
    assert told.get("D's core, which takes requests in between two steps", 0) == in_core_ms


def test_queue_behind_others_is_compute_and_their_blocks_are_not() -> None:
    """Passed over by steps that compute: queue. The step that ran at arrival: its boundary."""
    trace = push().shifted(3.5, 30, only=[s.name for s in stages.STAGES if s is not stages.DECODE_ALLOCATED])
    trace.step(P, 100, (0, 0, 12, 12, 13), tokens=500).step(P, 101, (13.5, 14, 33, 33, 33.5), tokens=500)
    causes = causes_ms(trace.answer())

    assert causes["prefill.step_boundary"] == 10.5
    assert causes["prefill.queue"] == 20.5


@pytest.mark.parametrize(("took_ms", "work_ms"), [(0, 0), (1, 0), (2, 2), (14, 14), (30, 30), (40, 30)])
def test_a_scheduler_that_takes_long_over_a_request_is_at_work(took_ms: float, work_ms: float) -> None:
    """Taken in at 3, given blocks at 34 in a turn that took so long; before it nobody is charged but for a turn."""
    trace = push().shifted(3.1, 30)
    trace.at(34, stages.PREFILL_ALLOCATED, "cmpl-r1-0-aaaaaaaa", 38, 0, round(took_ms * MS))
    answer = trace.answer()
    told = {one.waited_for: (one.end_ns - one.start_ns) / MS for one in answer.segments}

    assert told.get("the scheduler, which was at work on this request", 0) == pytest.approx(work_ms)
    assert causes_ms(answer).get("unattributed", 0) == pytest.approx(30 - work_ms)


@pytest.mark.parametrize(("took_ms", "blocks_ms"), [(0, 11), (30, 0)])
def test_the_look_that_led_to_blocks_was_not_in_vain(took_ms: float, blocks_ms: float) -> None:
    """Looked at at 4 and given blocks at 34: by that look, or by a later one that nobody recorded."""
    p = "cmpl-r1-0-aaaaaaaa"
    trace = push().shifted(3.1, 30).at(4, stages.PREFILL_CONSIDERED, p, 0, 0)
    trace.at(34, stages.PREFILL_ALLOCATED, p, 38, 0, round(took_ms * MS))
    trace.at(1, stages.PREFILL_FINISHED, "kept", 900, 1, process=P)
    causes = causes_ms(next(one for one in trace.answers() if one.segments))

    assert causes.get("prefill.capacity", 0) == blocks_ms


def test_chunks_of_others_between_own_chunks_are_queue() -> None:
    """Two own chunks with a step for others in between."""
    trace = push().without(
        "prefill.scheduled", "step.scheduled", "step.started", "step.forwarded", "step.connected", "step.ended"
    )
    p = "cmpl-r1-0-aaaaaaaa"
    trace.at(4, stages.PREFILL_SCHEDULED, p, 1, 300, 0, 600).at(20, stages.PREFILL_SCHEDULED, p, 3, 300, 300, 600)
    trace.step(P, 1, (4, 5, 10, 10, 11), tokens=300).step(P, 2, (11, 11, 19, 19, 20), tokens=500)
    trace.step(P, 3, (20, 21, 30, 30.5, 31), tokens=300)
    trace.at(46, stages.DECODE_SCHEDULED, "cmpl-r1-0-bbbbbbbb", 9, 1, 599, 600)
    trace.step(D, 9, (46, 46.5, 52, 53, 54), connector_ms=0.5)
    causes = causes_ms(trace.answer())

    assert (causes["prefill.forward"], causes["prefill.others"], causes["prefill.launch"]) == (14, 9, 2)
