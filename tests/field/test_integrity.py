"""Checksums of handed-over blocks: what differs is corrupt and named, what nobody compared is never counted as good."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtrace import stages
from kvtrace.model import Attribution, Event
from tests.field.scenes import D1, D_LEG, P1, P_LEG, changed, lacking, ranks, two_ranks, unanswered
from tests.trace import D, P, Trace, pull, push

SIZE = 65_536
BLOCKS = (11, 12, 13)


def checked(
    trace: Trace, blocks: tuple[int, ...] = BLOCKS, rank: int = 0, processes: tuple[int, int] = (P, D)
) -> Trace:
    """Add the same checksums of both sides, P's from 35 on and D's from 46 on."""
    ref = D_LEG if any(event.stage == "transfer.matched" for event in trace.events) else ""
    for number, block in enumerate(blocks):
        payload = (rank, block, 1000 + block, SIZE)
        trace.at(35 + number / 10, stages.PREFILL_CHECKED, P_LEG, *payload, ref=ref, process=processes[0])
        trace.at(46 + number / 10, stages.DECODE_CHECKED, D_LEG, *payload, process=processes[1])
    return trace


def of_block(block: int) -> Callable[[Event], bool]:
    return lambda event: event.b == block


def counts(answer: Attribution) -> tuple[int, int, int]:
    assert answer.integrity is not None
    return answer.integrity.checked, len(answer.integrity.corrupt), answer.integrity.unchecked


@pytest.mark.parametrize("make", [push, pull])
def test_a_block_that_differs_is_corrupt_and_named(make: Callable[[], Trace]) -> None:
    """Public reports tell of freed and reused blocks read with status 200. Here one of three is other."""
    good = checked(make()).answer()
    bad = changed(checked(make()), stages.DECODE_CHECKED, of_block(12), c=7).answer()

    assert (good.verdict, good.note, counts(good)) == ("complete", "", (3, 0, 0))
    side = "D" if make is push else "P"
    assert (bad.verdict, counts(bad)) == ("corrupt", (3, 1, 0))
    assert bad.note == (
        "the output is suspect: 1 of 3 blocks on D differ from what P computed "
        f"(rank 0, by their numbers on {side}: 12)"
    )
    assert (bad.ttft_ns, bad.shares_ns) == (good.ttft_ns, good.shares_ns)


def test_a_late_read_behind_blocks_that_differ_is_told() -> None:
    """Corrupt outranks expired, and the read that came after P's lease is the likely reason."""
    late = checked(pull()).at(39.5, stages.LEASE_EXPIRED, P_LEG, 0, process=P)
    bad = changed(late, stages.DECODE_CHECKED, of_block(12), c=7)

    assert late.answer().verdict == "expired"
    assert bad.answer().verdict == "corrupt"
    assert bad.answer().note.endswith("12); the transfer was over 3.50 ms after P's lease had ended")


def test_requests_that_were_not_chosen_are_not_spoken_of() -> None:
    assert push().answer().integrity is None


@pytest.mark.parametrize("make", [push, pull])
@pytest.mark.parametrize("stage", [stages.PREFILL_CHECKED, stages.DECODE_CHECKED])
def test_a_block_of_which_one_side_says_nothing_is_unchecked(make: Callable[[], Trace], stage: stages.Stage) -> None:
    """In pull P has checksums of blocks that D did not need, too: these were not handed over."""
    trace = lacking(checked(make()), lambda event: event.stage == stage.name and event.b == 12)
    told = stage is stages.DECODE_CHECKED
    if told:
        trace.at(47, stages.UNCHECKED, D_LEG, 0, 1, ref="it was let go", process=D)
    answer = trace.answer()

    assert (answer.verdict, counts(answer)) == ("complete", (2, 0, 1))
    assert answer.note == "1 of 3 blocks could not be checked: " + (
        "it was let go" if told else "P and D have no checksum of the same bytes"
    )


def test_blocks_that_d_had_cached_were_not_handed_over() -> None:
    trace = lacking(checked(pull()), lambda event: event.stage == "decode.checked" and event.b == 11)

    assert counts(trace.answer()) == (2, 0, 0)


def test_what_nobody_could_check_is_not_good() -> None:
    """P never checked, D could read nothing: no verdict follows, and the note says why."""
    lonely = lacking(checked(pull()), lambda event: event.stage == "prefill.checked").answer()
    why = "the model has several kinds of KV cache"
    blind = pull().at(46, stages.UNCHECKED, D_LEG, 0, 3, ref=why, process=D).answer()

    assert (lonely.verdict, counts(lonely)) == ("complete", (0, 0, 3))
    assert lonely.note == "3 of 3 blocks could not be checked: there is no checksum of P's"
    assert counts(blind) == (0, 0, 3)
    assert blind.note.endswith(f": {why}")


def test_checksums_over_other_bytes_say_nothing() -> None:
    """Blocks of another size on D, or one block's number twice on one side, compare with nothing."""
    other = changed(checked(pull()), stages.DECODE_CHECKED, of_block(11), d=SIZE // 2, c=1).answer()
    twice = checked(pull()).at(48, stages.DECODE_CHECKED, D_LEG, 0, 11, 5, SIZE, process=D).answer()

    assert (other.verdict, counts(other)) == ("complete", (2, 0, 1))
    assert (twice.verdict, counts(twice)) == ("complete", (2, 0, 1))


def test_ranks_of_other_widths_cut_blocks_differently() -> None:
    """P has one rank and D two: what differs then is the layout. With two on both sides each rank has its own."""
    trace = checked(checked(two_ranks()), rank=1, processes=(P1, D1))
    rank_1 = changed(trace, stages.DECODE_CHECKED, lambda event: (event.a, event.b) == (1, 13), c=9)
    (alike,) = rank_1.answers(ranks(2, 2))
    narrow = lacking(trace, lambda event: event.process == P1)
    (apart,) = changed(narrow, stages.DECODE_CHECKED, c=9).answers(ranks(1, 2))

    assert (alike.verdict, counts(alike)) == ("corrupt", (6, 1, 0))
    assert "(rank 1, by their numbers on P: 13)" in alike.note
    assert (apart.verdict, counts(apart)) == ("complete", (0, 0, 6))
    assert "P has 1 and D 2 tensor-parallel ranks, which cut blocks differently" in apart.note


def test_blocks_written_for_another_answer_are_not_this_ones() -> None:
    """P writes to each answer's own blocks: what it wrote for another one is not missing here."""
    trace = checked(push())
    trace.at(36, stages.PREFILL_CHECKED, P_LEG, 0, 99, 5, SIZE, ref="1_" + D_LEG, process=P)

    assert counts(trace.answer()) == (3, 0, 0)


def test_an_aborted_request_keeps_its_verdict_and_a_recomputed_one_its_own() -> None:
    """Without a token nobody went on from the blocks; after a failed load D computed the prompt itself."""
    trace = changed(checked(pull()), stages.DECODE_CHECKED, of_block(12), c=7)
    aborted = unanswered(trace).at(50, stages.DECODE_ABORTED, D_LEG).answer()
    again = trace.at(44, stages.LOAD_FAILED, D_LEG, 0, 38).answer()

    assert aborted.verdict == "aborted"
    assert aborted.note.startswith("the request was aborted before its first token, after transfer.notified")
    assert "1 of 3 blocks on D differ" in aborted.note
    assert again.verdict == "recomputed"
    assert "1 of 3 blocks on D differ" in again.note
