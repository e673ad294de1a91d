"""Ids: how legs find each other, ids that repeat, retries, several prefills for one decode, several answers."""

from __future__ import annotations

import pytest

from kvtrace import attempts, legs, stages
from tests.field.scenes import (
    D_LEG,
    P_LEG,
    by_id,
    carrying,
    changed,
    engines_only,
    lacking,
    renamed,
    repeated,
    total_ms,
    unanswered,
)
from tests.trace import MS, D, P, Trace, causes_ms, ns, pull, push


def test_both_engines_are_one_timeline() -> None:
    """vllm#21037. Linked by what D was told, the legs are one request; under other ids and without it they are two."""
    apart = renamed(pull(), {D_LEG: "cmpl-x9-0-bbbbbbbb"})
    linked = apart.answer()
    unlinked = changed(changed(apart, stages.DECODE_ENQUEUED, ref=""), stages.PREPARED, ref="").answers()

    assert {"prefill.forward", "decode.first_step"} <= set(causes_ms(linked))
    assert (linked.verdict, linked.request.join_method) == ("complete", "remote_request_id")
    assert sorted(answer.verdict for answer in unlinked) == ["incomplete", "incomplete"]
    assert not any({"prefill.forward", "decode.first_step"} <= set(causes_ms(answer)) for answer in unlinked)


def _without_word() -> Trace:
    """Return a push of which neither engine said whose legs belong together."""
    return changed(push(), stages.DECODE_ENQUEUED, ref="").without("transfer.matched")


@pytest.mark.parametrize(
    ("trace", "method"),
    [
        (push(), "matched"),
        (changed(pull(), stages.DECODE_ENQUEUED, ref=P_LEG), "remote_request_id"),
        (_without_word(), "base_id"),
        (carrying(_without_word(), "t", "t"), "transfer_id"),
        (carrying(_without_word(), "t", "u"), "base_id"),
        (carrying(push(), "t", "u"), "matched"),
        (renamed(carrying(_without_word(), "t", "t"), {D_LEG: "cmpl-r2-0-bbbbbbbb"}), "transfer_id"),
        (renamed(carrying(_without_word(), "t", ""), {D_LEG: "cmpl-r2-0-bbbbbbbb"}), "none"),
        (renamed(_without_word(), {D_LEG: "cmpl-r2-0-bbbbbbbb"}), "none"),
        (
            renamed(engines_only(pull()), {P_LEG: "chatcmpl-q-aaaaaaaa", D_LEG: "chatcmpl-r-bbbbbbbb"}),
            "remote_request_id",
        ),
    ],
    ids=[
        "sender's match",
        "told by D",
        "same base",
        "same transfer",
        "same base, other transfers",
        "sender's match, other transfers",
        "same transfer, ids of their own",
        "one transfer, ids of their own",
        "nothing",
        "told by D, ids of their own",
    ],
)
def test_what_joins_the_legs_is_stored(trace: Trace, method: str) -> None:
    """vllm#27987, vllm#34415, dynamo#7030. Match, what D was told, the transfer, the id; never a trace context."""
    answer = max(trace.answers(), key=lambda one: (len(one.request.transfers), one.ttft_ns or 0))

    assert answer.request.join_method == method
    told = {stage.name for stage in stages.STAGES for field in stage.fields if "trace" in field.name}
    assert told == {stages.ROUTER_TRACED.name}, "engines say nothing of one, so it can join no legs"


@pytest.mark.parametrize(
    ("sent", "engine_side"),
    [
        ("___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_5f1cf0b3a1d24d0c9a3e2f7b8c9d0e1f", "cmpl-{}-0-{}"),
        ("job-12345678", "chatcmpl-{}-{}"),
        ("17", "0_cmpl-{}-0-{}"),
    ],
    ids=["vllm-router's", "looks like a suffix", "first of several answers"],
)
def test_ids_of_other_routers_are_found_again(sent: str, engine_side: str) -> None:
    """vllm-router puts both addresses into the id; the id that the front ends were sent names the request."""
    names = {"r1": sent, P_LEG: engine_side.format(sent, "aaaaaaaa"), D_LEG: engine_side.format(sent, "bbbbbbbb")}
    answer = engines_only(renamed(pull(), names)).answer()

    assert (answer.request.request_id, answer.verdict, answer.scope) == (sent, "complete", "engine")


def test_a_transfer_id_that_several_prompts_share_joins_none_of_them() -> None:
    """Prompts of one completion have one transfer_id: what tells them apart is their ids."""
    second = {"r1": "r1", P_LEG: "cmpl-r1-1-aaaaaaaa", D_LEG: "cmpl-r1-1-bbbbbbbb"}
    one = carrying(_without_word(), "t", "t")
    both = repeated(one, renamed(lacking(one, lambda e: not e.request.startswith("cmpl-")), second)).answers()

    assert [answer.request.join_method for answer in both] == ["base_id", "base_id"]
    names = [{e.request for events in a.request.events.values() for e in events if "cmpl" in e.request} for a in both]
    assert sorted(map(sorted, names)) == [[P_LEG, D_LEG], [second[P_LEG], second[D_LEG]]]


def test_without_the_random_suffix_each_arrival_is_a_request() -> None:
    """vllm#10583. One id twice on both engines; take the second arrivals away and nothing tells the two apart."""
    plain = renamed(engines_only(pull()), {P_LEG: "cmpl-r1-0", D_LEG: "cmpl-r1-0"})
    second = plain.later(200)
    second.events = [e._replace(a=8) if e.stage in legs.TRANSFER_STAGES else e for e in second.events]
    twice = repeated(plain, second)
    answers = twice.answers()

    assert [(answer.verdict, total_ms(answer)) for answer in answers] == [("complete", 55), ("complete", 55)]
    assert [answer.start_ns for answer in answers] == [ns(2), ns(202)]
    assert [len(answer.request.transfers) for answer in answers] == [1, 1]
    merged = lacking(twice, lambda e: e.stage.endswith(".enqueued") and e.t_ns > ns(200))
    assert len(merged.answers()) == 1


def test_one_client_id_at_the_same_time_is_no_retry() -> None:
    """The client's id may repeat: three requests under way at once are three first attempts."""
    same = [changed(push(name=f"k{i}").later(10 * i, 100 * (i + 1)), stages.ROUTER_RECEIVED, ref="c") for i in range(3)]
    answers = repeated(*same).answers()

    assert [(answer.request.client_request_id, answer.request.attempt) for answer in answers] == [("c", 0)] * 3


def timed_out(*, failed: bool) -> Trace:
    """Return two attempts of client request c: at 20,000 the router gives one up, at 20,100 the client is back."""
    first = unanswered(push(name="k1")).without(*[s.name for s in stages.STAGES if s.name.startswith("decode.")])
    first = lacking(first, lambda event: event.stage.startswith(("transfer.", "registration.")))
    first.at(30_031, stages.LEASE_EXPIRED, "cmpl-k1-0-aaaaaaaa")
    if failed:
        first.at(20_000, stages.ROUTER_FAILED, "k1", 504, ref="prefill: timed out")
    whole = repeated(first, push(name="k2").later(20_100))
    return changed(whole, stages.ROUTER_RECEIVED, ref="c")


def test_a_retry_says_what_the_lost_attempt_cost() -> None:
    """vllm#29906. Each attempt is explained; without the router's giving up nobody knows that the second is a retry."""
    found, unknown = by_id(timed_out(failed=True)), by_id(timed_out(failed=False))

    assert (found["k1"].verdict, found["k1"].note) == ("failed", "the router gave up: prefill: timed out")
    assert (found["k1"].blocks.held_ns, found["k1"].blocks.held_after_end_ns) == (30_000 * MS, 10_031 * MS)
    assert (found["k2"].verdict, found["k2"].request.attempt, total_ms(found["k2"])) == ("complete", 1, 60)
    assert "1 earlier attempt (k1) lost, which cost 20,100 ms before this one began" in found["k2"].note
    assert (unknown["k1"].verdict, unknown["k2"].request.attempt, unknown["k2"].request.lost) == ("expired", 0, ())


def test_a_client_that_comes_back_much_later_asks_anew() -> None:
    late = timed_out(failed=True).shifted(20_050, attempts.RETRY_NS / MS, only=[s.name for s in stages.STAGES])

    assert by_id(late)["k2"].request.attempt == 0


def two_prefills() -> Trace:
    """Return a pull whose first leg on P got a 502 at 35; 200 ms on a sidecar sends another one under the same id."""
    lost = lacking(pull(), lambda e: not e.stage.startswith("prefill.") or e.stage == "prefill.http_responded")
    lost = renamed(lost, {P_LEG: "cmpl-r1-0-11111111"}).at(35, stages.PREFILL_HTTP_DONE, "r1", 502)
    lost = changed(lost, stages.PREFILL_SCHEDULED, a=51)
    return repeated(pull().shifted(1.5, 200), lost.step(P, 51, (4, 10, 30, 30.5, 31), tokens=600))


def test_two_prefills_for_one_decode() -> None:
    """llm-d's sidecar tries the same P again under the same id. The lost leg is an attempt of its own and named."""
    trace = two_prefills()
    found = by_id(trace)
    lost, answered = found["cmpl-r1-0-11111111"], found["r1"]
    alone = lacking(
        trace, lambda e: "11111111" in e.request or (e.t_ns < ns(150) and e.stage.startswith("prefill."))
    ).answer()

    assert (lost.ttft_ns, answered.verdict, answered.request.attempt) == (None, "complete", 1)
    assert (total_ms(answered), causes_ms(answered)["attempt.lost"], causes_ms(answered)["prefill.hop"]) == (
        260,
        200,
        1,
    )
    assert answered.request.lost == (("cmpl-r1-0-11111111", ns(2), ns(202)),)
    assert ("attempt.lost" in causes_ms(alone), causes_ms(alone)["prefill.hop"]) == (False, 201)


def test_a_leg_that_the_router_sent_again_is_on_its_way_since_then() -> None:
    """A push whose P had restarted: D's leg is sent at 1 and, after P's reply, at 34 once more."""
    again = push(74).shifted(1, 38, only=["decode.http_received", "decode.enqueued"])
    again = again.shifted(3.4, 69, only=["decode.allocated"]).at(39, stages.ROUTER_DECODE_SENT, "r1")
    once = lacking(again, lambda e: e.stage == "router.decode_sent" and e.t_ns > ns(10))
    waited = {segment.waited_for: segment.end_ns - segment.start_ns for segment in again.answer().segments}

    assert waited["the router to send the decode leg"] == 5 * MS
    assert "the router to send the decode leg" not in {segment.waited_for for segment in once.answer().segments}


# Several answers to one prompt -------------------------------------------------------------------------------


def answers_to_one(count: int) -> Trace:
    """Return one prompt with several answers by pull: all name P's leg, each reads its KV by itself, 5 ms apart."""
    trace = Trace()
    for number in range(count):
        one = renamed(pull(), {D_LEG: f"{number}_{D_LEG}"})
        one.events = [
            e._replace(a=7 + number) if e.process == D and e.stage.startswith("transfer.") else e for e in one.events
        ]
        one = one.shifted(36.5, 5 * number)
        one.events = [e._replace(a=9 + number) if e.a == 9 else e for e in one.events]
        mine = lacking(one, lambda e: e.process != D) if number else one
        trace = repeated(trace, mine)
    return trace


def test_several_answers_each_have_their_own_hand_off() -> None:
    """vllm#43509. Two of three get their KV; the third is stranded, and P's leg is known for it all the same."""
    whole = by_id(answers_to_one(3))
    stranded = by_id(
        lacking(
            answers_to_one(3),
            lambda e: e.request.startswith("2_") and e.stage not in ("decode.enqueued", "decode.allocated"),
        )
    )

    assert {name: answer.verdict for name, answer in whole.items()} == {
        "r1": "complete", f"1_{D_LEG}": "complete", f"2_{D_LEG}": "complete"
    }  # fmt: skip
    assert [answer.scope for answer in whole.values()] == ["router", "engine", "engine"]
    last = stranded[f"2_{D_LEG}"]
    assert (last.verdict, last.ttft_ns, last.request.prefill_engine) == ("incomplete", None, "engine-p")
    assert last.note.startswith("no first token was recorded; the last point is")
    assert stranded["r1"].verdict == stranded[f"1_{D_LEG}"].verdict == "complete"


def test_an_answer_without_a_write_of_its_own_has_none() -> None:
    """By push, two answers to one prompt and one write, to the first: nothing tells how the second got its KV."""
    second = changed(renamed(push(), {D_LEG: f"1_{D_LEG}"}), stages.DECODE_ENQUEUED, ref=P_LEG)
    second = second.shifted(2.9, 0.2, only=["decode.enqueued"]).shifted(45.5, 20)
    second.events = [e._replace(a=10) if e.a == 9 else e for e in second.events]
    trace = repeated(push(), lacking(second, lambda e: e.process != D or e.stage == "transfer.notified"))
    answers = by_id(trace)

    assert (answers["r1"].verdict, len(answers["r1"].request.transfers)) == ("complete", 1)
    assert (answers[f"1_{D_LEG}"].verdict, answers[f"1_{D_LEG}"].request.transfers) == ("incomplete", [])
    assert answers[f"1_{D_LEG}"].note.startswith("no transfer was recorded")


def test_a_second_read_after_p_let_go_is_suspect() -> None:
    """vllm#43509. P lets go after the first read at 43.5; the second answer reads at 44 what may be another's."""
    trace = answers_to_one(2).at(43.5, stages.PREFILL_RELEASED, P_LEG)
    kept = changed(trace, stages.PREFILL_RELEASED, t_ns=ns(60))

    assert by_id(trace)[f"1_{D_LEG}"].verdict == "expired"
    assert by_id(trace)["r1"].verdict == "complete"
    assert by_id(kept)[f"1_{D_LEG}"].verdict == "complete"


def test_prompts_of_one_completion_stay_apart() -> None:
    """Two prompts in one request: each leg on D meets the leg on P of its own index."""
    both = {P_LEG: "cmpl-r1-1-cccccccc", D_LEG: "cmpl-r1-1-dddddddd"}
    second = renamed(lacking(pull().later(3), lambda e: e.process not in (P, D)), both)
    answers = by_id(changed(repeated(pull(), second), stages.DECODE_ENQUEUED, ref=""))

    assert {name: answer.request.join_method for name, answer in answers.items()} == {
        "r1": "base_id", "cmpl-r1-1-dddddddd": "base_id"
    }  # fmt: skip
    assert {e.request for e in answers["r1"].request.events["prefill.finished"]} == {P_LEG}
    assert {answer.verdict for answer in answers.values()} == {"complete"}
