"""Leases, blocks held for nobody, and reads of blocks that were given up: 200 OK is no proof of a hand-off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtrace import stages
from kvtrace.model import Attribution
from tests.field.scenes import (
    D_LEG,
    P_LEG,
    STAND_IN,
    changed,
    engines_only,
    going_on,
    lacking,
    ranks,
    two_ranks,
    unanswered,
)
from tests.trace import D_API, MS, PROCESSES, D, P, Trace, ns, pull, push


def test_a_read_after_the_lease_is_one_incident_however_many_ranks_warn() -> None:
    """aws-do-eks#84. Eight ranks let go at 41, the read is over at 43, the answer is a 200; from 44 on it is whole."""
    late, early = pull(), pull()
    for rank in range(8):
        late.at(41, stages.LEASE_EXPIRED, P_LEG, rank)
        early.at(44, stages.LEASE_EXPIRED, P_LEG, rank)
    suspect, whole = late.answer(), early.answer()

    assert (suspect.verdict, suspect.ttft_ns) == ("expired", 60 * MS)
    assert suspect.note == "the output is suspect: the transfer was over 2.00 ms after P's lease had ended"
    assert (whole.verdict, whole.note) == ("complete", "")


@pytest.mark.parametrize(("make", "posted_ms"), [(pull, 39.0), (push, 36.0)], ids=["read", "write"])
def test_a_transfer_of_blocks_that_were_let_go_is_suspect(make: Callable[..., Trace], posted_ms: float) -> None:
    """vllm#52234, vllm#55470. P let the blocks go 1 ms before the post; letting go during the read is the usual end."""
    late = make().at(posted_ms - 1, stages.PREFILL_RELEASED, P_LEG).answer()
    usual = make().at(posted_ms + 1, stages.PREFILL_RELEASED, P_LEG).answer()

    assert (late.verdict, usual.verdict) == ("expired", "complete")
    assert "the output is suspect: the transfer began 1.00 ms after P had let the blocks go" in late.note


def _apart(skew_ms: float, *let_go: tuple[float, stages.Stage]) -> Attribution:
    """Return a pull whose D is on another host, its clock `skew_ms` ahead; P lets the blocks go as told."""
    processes = {**PROCESSES, **{one: replace(PROCESSES[one], domain="host-b") for one in (D, D_API)}}
    trace = Trace()
    trace.events = [
        e._replace(t_ns=ns(skew_ms) - ns(0) + e.t_ns) if e.process in (D, D_API) else e for e in pull().events
    ]
    for at_ms, stage in let_go:
        trace.at(at_ms, stage, P_LEG)
    (answer,) = trace.answers(processes)
    return answer


def test_clocks_of_two_hosts_prove_no_late_read() -> None:
    """P hears of the read at 43.5 and lets go at 44; with D's clock 50 ms ahead the post is stamped 89."""
    usual = _apart(50, (44, stages.PREFILL_RELEASED))
    untold = _apart(50, (43, stages.PREFILL_RELEASED))
    expired = _apart(50, (44, stages.LEASE_EXPIRED))

    assert (usual.verdict, usual.note) == ("complete", "")
    assert (untold.verdict, expired.verdict) == ("complete", "complete")
    assert untold.note == (
        "by the wall clocks of two hosts, which may disagree, the transfer began 46.0 ms after P had let the blocks go"
    )
    assert "the transfer was over 49.0 ms after P's lease had ended" in expired.note


def test_every_transfer_is_looked_at_not_only_the_last() -> None:
    """Rank 0 posts at 46, after the release at 45; rank 1, which posted at 39, is the last to be done."""
    trace = two_ranks()
    for stage, at_ms in ((stages.POST_STARTED, 46), (stages.POST_ENDED, 47), (stages.TRANSFER_DONE, 50)):
        trace = changed(trace, stage, lambda e: e.a == 7, t_ns=ns(at_ms))
    trace = changed(trace, stages.REPORTED, lambda e: e.a == 0, t_ns=ns(51))
    (late,) = trace.at(45, stages.PREFILL_RELEASED, P_LEG).answers(ranks(2, 2))
    (usual,) = changed(trace, stages.PREFILL_RELEASED, t_ns=ns(46.5)).answers(ranks(2, 2))

    assert (late.verdict, usual.verdict) == ("expired", "complete")
    assert "the transfer began 1.00 ms after P had let the blocks go" in late.note


def test_both_sides_of_a_lease() -> None:
    """vllm#21570. P gives up at 500 and D, which waits for the KV, is not told; told, it has an end of its own."""
    trace = unanswered(pull()).without("transfer.done")
    untold = trace.at(500, stages.LEASE_EXPIRED, P_LEG).answer()
    told = trace.at(501, stages.LOAD_FAILED, D_LEG, 0, 38).answer()
    unknown = trace.without("prefill.lease_expired", "decode.load_failed").answer()

    assert (untold.verdict, "D was not seen to learn of it" in untold.note) == ("expired", True)
    assert (told.verdict, "D was not seen to learn of it" in told.note) == ("expired", False)
    assert unknown.verdict == "incomplete"


def _leased(*extended_ms: float) -> Trace:
    """Return a push that nobody came for: P holds its blocks from 31 on, with a lease of 30 s from 33 on."""
    trace = unanswered(push()).without("decode.registration_sent", "registration.received", "transfer.matched")
    trace = lacking(trace, lambda event: event.stage.startswith("transfer."))
    trace.at(33, stages.LEASE_STARTED, P_LEG, 0, 30_000 * MS)
    for at_ms in extended_ms:
        trace.at(at_ms, stages.LEASE_EXTENDED, P_LEG)
    return going_on(trace, P, 60_033)


def test_blocks_held_past_their_lease_are_told() -> None:
    """vllm#58222. The lease ends at 30.0 s and P still holds the blocks at 60.0; a heartbeat or an expiry explains."""
    assert "P held 38 blocks 30.0 s past their lease" in _leased().answer().note
    assert "past their lease" not in _leased(30_000).answer().note
    assert "past their lease" not in _leased().at(30_040, stages.LEASE_EXPIRED, P_LEG).answer().note


def test_a_finished_write_without_release() -> None:
    """vllm#58188. P knew at 43 that its write was done and still holds the blocks five seconds later."""
    held = going_on(push(), P, 5_043).answer()
    free = going_on(push(), P, 5_043).at(50, stages.PREFILL_RELEASED, P_LEG).answer()

    assert (held.verdict, held.blocks.held_ns) == ("complete", None)
    assert held.note == "P was not seen to let its 38 blocks go, 5.00 s after nobody needed them any more"
    assert (free.note, free.blocks.held_ns) == ("", 19 * MS)


def _aborted(at_ms: float) -> Trace:
    """Return a push that the client leaves at `at_ms`, and D aborts 1 ms later."""
    trace = lacking(push(), lambda e: e.t_ns > ns(at_ms) and e.process != P and "step." not in e.stage)
    return trace.at(at_ms, stages.ROUTER_CANCELLED, "r1").at(at_ms + 1, stages.DECODE_ABORTED, D_LEG)


def test_an_abort_while_d_waits_leaves_blocks_on_both_sides() -> None:
    """vllm#46283, vllm#46289. Aborted at 41, both sides hold 38 blocks; after P's release only D's stand."""
    trace = going_on(_aborted(40), P, 5_040)
    held = trace.answer()
    freed = trace.at(340, stages.PREFILL_RELEASED, P_LEG).answer()

    assert held.verdict == freed.verdict == "aborted"
    assert "D had 38 blocks reserved for KV that had not come when it was aborted" in held.note
    assert "P was not seen to let its 38 blocks go" in held.note
    assert "P was not seen" not in freed.note
    assert (held.blocks.held_after_end_ns, freed.blocks.held_after_end_ns) == (None, 300 * MS)
    assert (held.blocks.reserved_blocks, held.blocks.reserved_ns) == (38, 37.5 * MS)


@pytest.mark.parametrize(
    ("at_ms", "after"),
    [
        (0.2, "router.received"), (2.5, "prefill.http_received"), (3.9, "decode.registration_queued"),
        (20, "registration.received"), (35.2, "transfer.matched"), (42.5, "transfer.notified"),
        (47, "decode.scheduled"),
    ],
)  # fmt: skip
def test_an_abort_at_every_stage_says_what_had_been_reached(at_ms: float, after: str) -> None:
    """A client that leaves before its first token; what P and the sender went on with is not what was reached."""
    trace = lacking(
        _aborted(at_ms), lambda e: e.t_ns > ns(at_ms) and e.stage not in ("router.cancelled", "decode.aborted")
    )
    answer = trace.answer()

    assert (answer.verdict, answer.ttft_ns) == ("aborted", None)
    assert answer.note.startswith(f"the request was aborted before its first token, after {after}")
    assert trace.without("router.cancelled", "decode.aborted").answer().verdict == "incomplete"


def test_a_client_that_leaves_after_its_first_token_has_had_its_hand_off() -> None:
    """The hand-off was whole; the answer was not, and the note says so."""
    cut = push().without("router.done", "decode.finished").at(80, stages.ROUTER_CANCELLED, "r1")
    cut.at(81, stages.DECODE_HTTP_DISCONNECTED, "r1").at(82, stages.DECODE_ABORTED, D_LEG)

    assert cut.answer().verdict == push().answer().verdict == "complete"
    assert cut.answer().note == "the answer was cut short 20.0 ms after its first token (router.cancelled)"
    assert push().answer().note == ""


def test_a_completion_after_the_end() -> None:
    """vllm#25562. D aborted at 41 and is told of the write at 42: no answer, and the stray completion is named."""
    trace = unanswered(push()).at(40, stages.ROUTER_CANCELLED, "r1").at(41, stages.DECODE_ABORTED, D_LEG)
    late = trace.answer()
    early = changed(trace, stages.NOTIFIED, t_ns=ns(40.5)).answer()

    assert (late.verdict, early.verdict) == ("aborted", "aborted")
    assert "a completion (transfer.notified) came 1.00 ms after its end on D" in late.note
    assert "a completion" not in early.note


def test_d_refuses_and_p_holds() -> None:
    """vllm#41269. D answers 400 before admission; P holds 38 blocks until its lease ends after 480 s."""
    trace = unanswered(pull()).without("decode.enqueued", "decode.allocated", "decode.load_started")
    trace = lacking(trace, lambda event: event.stage.startswith("transfer."))
    trace.at(36, stages.DECODE_HTTP_DONE, "r1", 400).at(480_031, stages.LEASE_EXPIRED, P_LEG)
    refused = trace.answer()
    unseen = trace.without("decode.http_done").answer()

    assert (refused.verdict, refused.note) == ("failed", "D refused the request (HTTP 400)")
    assert (refused.blocks.held_blocks, refused.blocks.held_ns) == (38, 480_000 * MS)
    assert unseen.verdict == "expired"
    assert refused.request.decode_engine == ""


@pytest.mark.parametrize("has_p", [True, False])
@pytest.mark.parametrize("tell", [push, pull])
def test_what_stands_for_a_refused_request_in_d_is_no_request_of_its_own(
    tell: Callable[[], Trace], *, has_p: bool
) -> None:
    """To have P's blocks let go, vLLM 0.32 adds a request of one token and aborts it: only its remote id is known.

    P may have refused as well, and then has no leg.
    """
    trace = lacking(unanswered(tell()), lambda event: event.request == D_LEG or event.stage.startswith("transfer."))
    trace = trace if has_p else lacking(trace, lambda event: event.request == P_LEG).without("router.prefill_returned")
    remote = P_LEG if tell is pull else "cmpl-r1-0"
    trace.at(35.5, stages.DECODE_ENQUEUED, STAND_IN, 1, 0, 1, ref=remote).at(35.6, stages.DECODE_ABORTED, STAND_IN)
    trace.at(36, stages.DECODE_HTTP_DONE, "r1", 404)
    by_router = trace.at(37, stages.ROUTER_FAILED, "r1", 404, ref="decode: 404").answer()
    by_engines = engines_only(trace).answer()

    assert (by_router.request.request_id, by_router.verdict, by_router.scope) == ("r1", "failed", "router")
    assert (by_engines.verdict, by_engines.note) == ("failed", "D refused the request (HTTP 404)")
    assert by_router.prompt_tokens == (600 if has_p else None)


def test_a_lease_is_extended_while_a_rank_of_the_other_side_lives() -> None:
    """The read ends long after the first lease: with the heartbeat it is whole, without it P had let go before."""
    trace = pull().shifted(40.5, 40_000).at(32, stages.LEASE_STARTED, P_LEG, 0, 30_000 * MS)
    kept = trace.at(25_000, stages.LEASE_EXTENDED, P_LEG).answer()
    gone = trace.without("prefill.lease_extended").at(30_032, stages.LEASE_EXPIRED, P_LEG).answer()

    assert (kept.verdict, gone.verdict) == ("complete", "expired")


def test_what_early_reservation_costs() -> None:
    """38 blocks of D stand reserved from 3.5 to 45; allocated at 23.5, half as long."""
    early, later = push().answer().blocks, push(24).shifted(3.4, 20, only=["decode.allocated"]).answer().blocks

    assert (early.reserved_blocks, early.reserved_ns) == (38, 41.5 * MS)
    assert (later.reserved_blocks, later.reserved_ns) == (38, 21.5 * MS)
