"""Who computed the prompt: handed over, cached, computed again on P, computed on D after all, or never handed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrace import stages
from kvtrace.analyze import analyze
from kvtrace.store import Store
from tests.asked import ask
from tests.field.scenes import D_LEG, P_LEG, changed, engines_only, lacking, total_ms
from tests.test_analyze import fill
from tests.trace import MS, P, Trace, causes_ms, pull, push

HANDED_OVER = ("decode.load_started", "decode.reported", "decode.ready")


def _cached(*, local_tokens: int, computed_tokens: int) -> Trace:
    """Return a pull of which the connector brings nothing: D's prefix cache has `local_tokens` of 600."""
    trace = lacking(pull(), lambda e: e.stage in HANDED_OVER or e.stage.startswith("transfer."))
    trace = changed(trace, stages.DECODE_ALLOCATED, b=0).at(36.9, stages.DECODE_CONSIDERED, D_LEG, local_tokens, 0)
    return changed(trace, stages.DECODE_SCHEDULED, b=600 - computed_tokens, c=computed_tokens)


def test_a_full_prefix_hit_is_a_hand_off_of_no_bytes() -> None:
    """vllm#18632, vllm#25267. D has the prompt cached: nothing moves. Computed instead, it is a hand-off refused."""
    cached = _cached(local_tokens=599, computed_tokens=599).answer()
    computed = _cached(local_tokens=0, computed_tokens=0).answer()

    assert (cached.verdict, cached.note) == ("complete", "D had the whole prompt cached: nothing had to move")
    assert (cached.shares_ns["transfer"], cached.request.transfers) == (0, [])
    assert computed.verdict == "recomputed"
    assert computed.note.startswith("D was told of KV and took none over: it computed 600 of 600 prompt tokens itself")


def test_tokens_from_p_are_no_prefix_hits() -> None:
    """vllm#46898. What the connector brings and what D's own cache had are told apart, whatever D counts as cached."""
    brought = pull().at(36.9, stages.DECODE_CONSIDERED, D_LEG, 0, 599).answer()
    cached = _cached(local_tokens=599, computed_tokens=599).answer()

    assert (brought.verdict, brought.note) == ("complete", "")
    assert (sum(t.moved_bytes for t in brought.request.transfers), len(cached.request.transfers)) == (1_300_000, 0)
    assert "cached" in cached.note


def test_counts_of_tokens_say_whose_they_are(tmp_path: Path) -> None:
    """vllm#46898. 400 tokens of D's cache and 199 of P, also where D looked before; the look gone, nothing is said."""
    looked = changed(pull(), stages.DECODE_ALLOCATED, b=199).at(36.9, stages.DECODE_CONSIDERED, D_LEG, 400, 199)
    looked.at(36.2, stages.DECODE_CONSIDERED, D_LEG, 0, 599).at(60, stages.DECODE_CONSIDERED, D_LEG, 599, 0)
    told = []
    for name, trace in (("looked", looked), ("unseen", looked.without("decode.considered", "decode.allocated"))):
        path = tmp_path / f"{name}.duckdb"
        with Store.open(path, "write") as store:
            fill(store, trace)
            analyze(store)
        (row,) = ask(path, "request_summary", request="r1")
        told.append((row["prompt_tokens"], row["cached_tokens"], row["remote_tokens"]))

    assert told == [(600, 400, 199), (600, None, None)]
    assert looked.without("decode.allocated").answer().prefix == (599, 0)
    assert pull().answer().prefix == (None, 599)


def test_a_partial_prefix_hit_moves_the_rest() -> None:
    """D has 400 tokens, P brings 199: complete. Had D computed from 400 on, what P brought was for nothing."""
    trace = changed(pull(), stages.DECODE_ALLOCATED, b=199).at(36.9, stages.DECODE_CONSIDERED, D_LEG, 400, 199)
    wasted = changed(trace, stages.DECODE_SCHEDULED, b=200, c=400).answer()

    assert trace.answer().verdict == "complete"
    assert (wasted.verdict, wasted.note) == (
        "recomputed", "D computed 200 of 600 prompt tokens itself, 199 were to come from P"
    )  # fmt: skip


def test_a_prefix_hit_on_p_is_less_to_compute_and_the_same_hand_off() -> None:
    """P has 400 of 600 tokens cached: the verdict stands, and no token was computed twice."""
    hit = changed(push(), stages.PREFILL_SCHEDULED, b=200, c=400).answer()
    whole = changed(push(), stages.PREFILL_SCHEDULED, b=600, c=600).answer()

    assert (hit.verdict, hit.note, causes_ms(hit)["prefill.forward"]) == ("complete", "", 20)
    assert "prefill.forward" not in causes_ms(whole)


def test_transferred_and_computed_again() -> None:
    """LMCache#1547. The KV was there at 45 and D's step at 46 takes the whole prompt; with one token it is complete."""
    again = changed(pull(), stages.DECODE_SCHEDULED, b=600, c=0).answer()

    assert pull().answer().verdict == "complete"
    assert (again.verdict, again.note) == (
        "recomputed", "D computed 600 of 600 prompt tokens itself, 599 were to come from P"
    )  # fmt: skip
    assert causes_ms(again)["decode.prefill"] == causes_ms(pull().answer())["decode.first_step"]


def test_a_failed_load_is_computed_on_d() -> None:
    """vllm#32200, vllm#34896. D computes the prompt after a failed load: compute on D under a cause of its own."""
    trace = pull().without("decode.reported", "decode.ready", "transfer.done")
    trace.at(43, stages.TRANSFER_FAILED, D_LEG, 7, ref="ERR").at(44, stages.LOAD_FAILED, D_LEG, 0, 38)
    failed = changed(trace, stages.DECODE_SCHEDULED, b=600, c=0).shifted(51.5, 40).answer()

    assert failed.verdict == "recomputed"
    assert causes_ms(failed)["decode.prefill"] == 45.5
    assert failed.shares_ns["compute.run"] - pull().answer().shares_ns["compute.run"] == 40 * MS
    assert causes_ms(failed)["wire"] == 3
    assert (pull().answer().verdict, "decode.prefill" in causes_ms(pull().answer())) == ("complete", False)


def test_preempted_after_its_kv_had_come() -> None:
    """vllm#18631, vllm#53250. One transfer, two schedulings: D takes the blocks at 45.5 and computes the prompt."""
    trace = pull().at(45.5, stages.DECODE_PREEMPTED, D_LEG)
    again = changed(trace, stages.DECODE_SCHEDULED, b=600, c=0).answer()

    assert again.verdict == "recomputed"
    assert "D computed 600 of 600 prompt tokens itself after a preemption" in again.note
    assert len(again.request.transfers) == 1
    assert trace.without("decode.preempted").answer().verdict == "complete"


def _computed_twice() -> Trace:
    """Return a push whose prompt P computes at 10..30, is preempted at 32, and computes again at 60..80."""
    trace = push().shifted(30.6, 50).at(32, stages.PREFILL_PREEMPTED, P_LEG)
    trace.at(54, stages.PREFILL_SCHEDULED, P_LEG, 3, 600, 0, 600)
    trace = lacking(trace, lambda e: e.stage == "step.ended" and e.a == 1 and e.process == P)
    return trace.at(31, stages.STEP_ENDED, "", 1, process=P).step(P, 3, (54, 60, 80, 80.5, 81), tokens=600)


def test_a_prompt_computed_twice_on_p() -> None:
    """vllm#50297. Both forwards are compute; the note says that one was for nothing, and why."""
    twice = _computed_twice().answer()
    once = _computed_twice().without("prefill.preempted").answer()

    assert causes_ms(twice)["prefill.forward"] == 40
    assert twice.note == "P computed 600 prompt tokens twice after a preemption"
    assert once.note == "P computed 600 prompt tokens twice"
    assert push().answer().note == ""


def test_a_hand_off_without_blocks() -> None:
    """vllm#50297. P was preempted in its last step and finishes with no blocks; D computes the prompt."""
    empty = changed(_cached(local_tokens=0, computed_tokens=0), stages.PREFILL_FINISHED, a=0).answer()
    kept = _cached(local_tokens=0, computed_tokens=0).answer()

    assert "P finished with no blocks to hand over" in empty.note
    assert "P finished with no blocks" not in kept.note
    assert (empty.blocks.held_blocks, kept.blocks.held_blocks) == (0, 38)


def _silent(kept: int) -> Trace:
    """Return a pull whose D was told of no KV, and computes the prompt by itself; P keeps its blocks or does not."""
    trace = lacking(pull(), lambda e: e.stage in HANDED_OVER or e.stage.startswith("transfer."))
    trace = changed(changed(trace, stages.DECODE_ENQUEUED, c=0, ref=""), stages.DECODE_ALLOCATED, b=0)
    trace = changed(trace, stages.DECODE_SCHEDULED, b=600, c=0)
    return changed(trace, stages.PREFILL_FINISHED, b=kept)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (0, "P computed the prompt and was not asked to keep its blocks; D was not told of any KV to take over"),
        (1, "P keeps the prompt's blocks and D was not told of them"),
    ],
)
def test_no_hand_off_and_no_error(kept: int, reason: str) -> None:
    """llm-d#2535. Without the parameters both engines compute the prompt, and nothing fails."""
    answer = _silent(kept).answer()

    assert (answer.verdict, answer.note) == ("no handoff", reason)
    assert causes_ms(answer)["decode.prefill"] == 5.5
    assert total_ms(answer) == 60
    assert changed(_silent(kept), stages.DECODE_ENQUEUED, c=1).answer().verdict == "recomputed"


def test_what_was_never_to_be_handed_over_is_told_apart() -> None:
    """A router that sends a short prompt to D alone, and a D that got one without a word."""
    alone = lacking(_silent(0), lambda e: "prefill" in e.stage or e.process == P)
    decided = changed(alone, stages.ROUTER_DECIDED, ref="local").answer()
    unsaid = engines_only(alone).answer()

    assert (decided.request.mode, decided.verdict, decided.note) == (
        "local", "no handoff", "the router sent it to D alone"
    )  # fmt: skip
    assert (unsaid.request.mode, unsaid.note) == ("local", "D was not told of any KV to take over")


def test_the_first_token_computed_again_has_a_cause_of_its_own() -> None:
    """vllm#50913. D's first step after a hand-off is not a prefill, and its length is that cause's and no other's."""
    plain, longer = push().answer(), push().shifted(51.5, 40).answer()

    assert causes_ms(longer)["decode.first_step"] - causes_ms(plain)["decode.first_step"] == 40
    assert "decode.prefill" not in causes_ms(longer)
    assert longer.verdict == "complete"
