"""vllm#53554: a host buffer needs one more copy on either side, told apart from the work that it stands in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtrace import stages
from kvtrace.copies import TO_DEVICE, TO_HOST
from kvtrace.model import Attribution
from tests.field.scenes import D1, D_LEG, P_LEG, changed, lacking, ranks, repeated, total_ms, waited_ms
from tests.field.test_published import explained
from tests.test_findings import findings_of, names, run_of
from tests.trace import MS, PROCESSES, D, P, Trace, causes_ms, check_tiles, ns, pull, push

SAVE_MS, LOAD_MS = 20, 15
COPIES = frozenset(("prefill.copy_started", "prefill.copied", "decode.copy_started", "decode.copied"))


def saved(trace: Trace, name: str = "r1", from_ms: float = 30.5) -> Trace:
    """Return a hand-off whose P copies for 20 ms behind its forward, which ends at 30: all that comes is later."""
    p = f"cmpl-{name}-0-aaaaaaaa"
    trace = trace.shifted(from_ms, SAVE_MS)
    trace = changed(trace, stages.STEP_CONNECTED, lambda e: e.process == P and e.a == 1, c=SAVE_MS * MS)
    trace.at(from_ms, stages.PREFILL_COPY_STARTED, p, 0, 38)
    return trace.at(from_ms + SAVE_MS, stages.PREFILL_COPIED, p, 0, 38, 1_300_000)


def loaded(trace: Trace, name: str = "r1", from_ms: float = 43.5) -> Trace:
    """Return a hand-off whose D copies for 15 ms between noticing the KV, at 43 in a pull, and reporting it."""
    d = f"cmpl-{name}-0-bbbbbbbb"
    trace = trace.shifted(from_ms + 0.1, LOAD_MS)
    trace.at(from_ms, stages.DECODE_COPY_STARTED, d, 0, 38)
    return trace.at(from_ms + LOAD_MS, stages.DECODE_COPIED, d, 0, 38, 1_300_000)


def buffered(name: str = "r1") -> Trace:
    """Return a pull through a host buffer on either side: P copies at 30.5..50.5, D at 63.5..78.5."""
    return saved(loaded(pull(name), name), name)


def unwatched(trace: Trace) -> Trace:
    """Return a copy in which nobody saw the copies."""
    return lacking(trace, lambda event: event.stage in COPIES)


def test_the_copies_are_transfer_and_nothing_else_changes() -> None:
    """35 ms of copies: everything else is what it is in a pull without a host buffer, and so is the bracket."""
    plain, answer = pull().answer(), buffered().answer()

    assert causes_ms(answer) == pytest.approx(causes_ms(plain) | {"host.copy": SAVE_MS + LOAD_MS})
    assert waited_ms(answer, "host.copy") == pytest.approx({TO_HOST: SAVE_MS, TO_DEVICE: LOAD_MS})
    assert (answer.shares_ns["transfer"] - plain.shares_ns["transfer"]) / MS == pytest.approx(SAVE_MS + LOAD_MS)
    assert (answer.transfer_low_ns - plain.transfer_low_ns) / MS == pytest.approx(SAVE_MS + LOAD_MS)
    assert (answer.transfer_high_ns - plain.transfer_high_ns) / MS == pytest.approx(SAVE_MS + LOAD_MS)
    assert (answer.verdict, answer.note) == (plain.verdict, plain.note)
    check_tiles(buffered())


def test_a_push_through_host_buffers_is_told_alike() -> None:
    """There D's sender thread notices at 42, and D's worker copies before it reports."""
    trace = saved(loaded(push(), from_ms=42.5))
    answer = trace.answer()

    assert causes_ms(answer) == pytest.approx(causes_ms(push().answer()) | {"host.copy": SAVE_MS + LOAD_MS})
    assert waited_ms(answer, "host.copy") == pytest.approx({TO_HOST: SAVE_MS, TO_DEVICE: LOAD_MS})
    check_tiles(trace)


def test_without_their_events_the_copies_are_other_work() -> None:
    """The deciding events: unseen, P's copy is the connector in its step and D's is the report."""
    plain, unseen = pull().answer(), unwatched(buffered()).answer()

    causes = causes_ms(plain)
    causes["step.connector"] += SAVE_MS
    causes["report"] += LOAD_MS
    assert causes_ms(unseen) == pytest.approx(causes)
    assert unseen.shares_ns["transfer"] == plain.shares_ns["transfer"]


def test_a_copy_that_ends_earlier_is_that_much_less() -> None:
    """P's copy ended at 40.5 and not at 50.5: the connector went on with something else for 10 ms."""
    early = changed(buffered(), stages.PREFILL_COPIED, t_ns=ns(40.5))
    causes = causes_ms(early.answer())

    assert (causes["host.copy"], causes["step.connector"]) == pytest.approx((SAVE_MS + LOAD_MS - 10, 10.5))


@pytest.mark.parametrize(("dropped", "left_ms"), [("prefill.copied", LOAD_MS), ("decode.copy_started", SAVE_MS)])
def test_a_copy_of_which_an_end_is_missing_is_none(dropped: str, left_ms: float) -> None:
    assert causes_ms(buffered().without(dropped).answer())["host.copy"] == pytest.approx(left_ms)


def test_a_copy_waits_for_the_forward_ahead_of_it_on_the_device() -> None:
    """D calls for the copy at 63.5 while its device computes for others until 70: only then do bytes move."""
    plain, behind = buffered().answer(), _behind(70).answer()

    assert waited_ms(behind, "host.copy")[TO_DEVICE] == pytest.approx(8.5)
    told = waited_ms(behind, "report")
    assert told["the forward of step 8, behind which D copies"] == pytest.approx(6.5)
    assert behind.ttft_ns == plain.ttft_ns
    assert waited_ms(_behind(63).answer(), "host.copy")[TO_DEVICE] == pytest.approx(LOAD_MS)
    check_tiles(_behind(70))


def _behind(forwarded_ms: float) -> Trace:
    """Return the pull in a step of D for others whose forward the device ends then; its connector copies until 79."""
    return buffered().step(D, 8, (60, 61, forwarded_ms, 79.2, 79.5), tokens=3, requests=3, connector_ms=16)


def test_chunks_are_copied_one_by_one() -> None:
    """P computes 300 tokens in step 1 and 300 in step 2, and copies behind both: for 10 ms and for 20."""
    trace = saved(loaded(pull())).shifted(25, 20)
    trace = changed(trace, stages.PREFILL_SCHEDULED, b=300)
    trace = lacking(trace, lambda e: e.process == P and e.stage.startswith("step."))
    trace.step(P, 1, (4, 10, 14, 24, 24.5), tokens=300, connector_ms=10)
    trace.at(14, stages.PREFILL_COPY_STARTED, P_LEG, 0, 19).at(24, stages.PREFILL_COPIED, P_LEG, 0, 19, 650_000)
    trace.at(25, stages.PREFILL_SCHEDULED, P_LEG, 2, 300, 300, 600)
    trace.step(P, 2, (25, 30, 50, 70.5, 71), tokens=300, connector_ms=SAVE_MS)
    answer = trace.answer()

    assert waited_ms(answer, "host.copy") == pytest.approx({TO_HOST: 10 + SAVE_MS, TO_DEVICE: LOAD_MS})
    assert causes_ms(answer)["prefill.forward"] == pytest.approx(4 + 20)
    check_tiles(trace)


def test_a_copy_ahead_of_ones_own_is_anothers() -> None:
    """D's worker copies r2's KV at 63..70 and r1's at 70..85: r1's report waits for r2's copy, which is no transfer."""
    trace = buffered().shifted(63.5, 6.5)
    d2 = "cmpl-r2-0-bbbbbbbb"
    trace.at(63, stages.DECODE_COPY_STARTED, d2, 0, 38).at(70, stages.DECODE_COPIED, d2, 0, 38, 1_300_000)
    trace.at(36, stages.DECODE_ENQUEUED, d2, 600, 0, 1, ref="cmpl-r2-0-aaaaaaaa")
    answer = next(one for one in trace.answers() if one.request.request_id == "r1")

    assert waited_ms(answer, "host.copy")[TO_DEVICE] == pytest.approx(LOAD_MS)
    assert waited_ms(answer, "report")["the copy of r2"] == pytest.approx(7)


def test_of_several_ranks_the_last_one_counts() -> None:
    """Rank 1 of D reports 5 ms behind rank 0, and copies for 10 ms where rank 0 copies for 15."""
    trace = buffered().shifted(79.05, 5)
    trace.at(74, stages.DECODE_COPY_STARTED, D_LEG, 1, 38, process=D1)
    trace.at(84, stages.DECODE_COPIED, D_LEG, 1, 38, 1_300_000, process=D1)
    trace.at(84, stages.REPORTED, D_LEG, 1, process=D1)
    trace.at(57, stages.LOAD_STARTED, D_LEG, 1, 38, process=D1).at(58.5, stages.PREPARED, D_LEG, 3, 20, 1, process=D1)
    trace.at(59, stages.POST_STARTED, D_LEG, 3, process=D1).at(60, stages.POST_ENDED, D_LEG, 3, 1000, 20, process=D1)
    trace.at(63, stages.TRANSFER_DONE, D_LEG, 3, process=D1)
    (answer,) = trace.answers(ranks(1, 2))

    assert waited_ms(answer, "host.copy")[TO_DEVICE] == pytest.approx(10)
    check_tiles(trace, ranks(1, 2))


def _beside(forwarded_ms: float = 62) -> Attribution:
    """Return r2, which decodes on D in step 10, whose connector copies r1's KV at 63.5..78.5."""
    other = lacking(push(name="r2").later(0, 200), lambda e: e.stage.startswith("step.") and e.process == P)
    other.events = [replaced for replaced in other.events if replaced.stage != "decode.finished"]
    other.step(D, 10, (60, 61, forwarded_ms, 79, 80), connector_ms=16).at(79.5, stages.DECODE_FINISHED, D2_LEG, 2)
    answers = repeated(buffered(), other).answers()
    return next(answer for answer in answers if answer.request.request_id == "r2")


D2_LEG = "cmpl-r2-0-bbbbbbbb"


@pytest.mark.parametrize(("forwarded_ms", "extended_ms", "blamed_ms"), [(62, 16, 15), (70, 9, 8.5)])
def test_a_copy_on_ds_forward_thread_makes_others_tokens_later(
    forwarded_ms: float, extended_ms: float, blamed_ms: float
) -> None:
    """What outlasts the forward of r2's step extends it: of the connector's 16 ms 15 are r1's copy."""
    pace = _beside(forwarded_ms).pace

    assert pace is not None
    assert (pace.extension_ns / MS, pace.occupancy_ns / MS) == (extended_ms, 16)
    assert pace.blame_ns == {"r1": pytest.approx(blamed_ms * MS)}


def test_explain_and_findings_name_the_copies(tmp_path: Path) -> None:
    """What an operator reads; of a run in which nobody saw the copies it is something else."""
    told = explained(tmp_path, buffered())
    (tmp_path / "run").mkdir()
    found = findings_of(tmp_path / "run", run_of(buffered))

    assert "Its longest wait was host.copy, 35.0 ms, most of the transfer" in told
    assert "41 % was transfer" in told
    assert names(found) == ["host.copy"]
    assert "kv_buffer_device" in found[0].remedy
    (tmp_path / "unseen").mkdir()
    unseen = findings_of(tmp_path / "unseen", run_of(lambda name: unwatched(buffered(name))))
    assert names(unseen) == ["step.connector", "report"]


def test_hosts_of_their_own_mark_no_copy() -> None:
    """A copy begins and ends on one clock, whichever host the other side is on."""
    apart = {**PROCESSES, D: replace(PROCESSES[D], domain="host-b")}
    (answer,) = buffered().answers(apart)

    assert [one.crosses_hosts for one in answer.segments if one.cause == "host.copy"] == [False, False]
    assert total_ms(answer) == total_ms(buffered().answer())
