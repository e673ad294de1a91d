"""Published answers come out, and go with their deciding event. Medians do not add up: each figure's neighbourhood."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kvtrace import stages
from kvtrace.analyze import analyze
from kvtrace.findings import checks, gather
from kvtrace.report import population, selection, sentences
from kvtrace.store import Store
from tests.asked import ask
from tests.field.published import FIRST_TOKEN_ON_P_MS, hand_over, joined, queued, read
from tests.field.scenes import changed, lacking, repeated, total_ms
from tests.test_analyze import fill
from tests.test_findings import findings_of, names, run_of
from tests.trace import MS, START_NS, Trace, causes_ms, ns, pull, push


def explained(path: Path, trace: Trace) -> str:
    """Return what `explain` says of the trace's first request."""
    with Store.open(path / "one.duckdb", "write") as store:
        fill(store, trace)
        analyze(store)
        (one, *_) = selection.explained(store, selection.all_keys(store)[:1])
        return sentences.explanation(one)


# vllm#50913: 197 ms from P's token to the client's, of which the transfer is 29 ------------------------------------


def test_the_hand_over_is_split_as_published() -> None:
    answer = hand_over().answer()
    causes = causes_ms(answer)
    again = sum(
        causes[name] for name in ("decode.launch", "decode.first_step", "decode.sample", "decode.step_boundary")
    )

    assert total_ms(answer) - FIRST_TOKEN_ON_P_MS == pytest.approx(197)
    assert answer.shares_ns["transfer"] / MS == pytest.approx(29, abs=1)
    assert causes["submit.wait"] == pytest.approx(28.8, abs=1)
    assert causes["detection"] == pytest.approx(28.1, abs=1)
    assert again == pytest.approx(58, abs=1)
    assert again > answer.shares_ns["transfer"] / MS > causes["submit.wait"] > causes["detection"]
    assert (answer.verdict, answer.shares_ns["unattributed"]) == ("complete", 0)
    assert (answer.transfer_low_ns / MS, answer.transfer_high_ns / MS) == pytest.approx((28.9, 29))


@pytest.mark.parametrize(
    ("cause", "from_ms", "by_ms"),
    [("submit.wait", 134, -28.8), ("detection", 192, -28.1), ("decode.first_step", 249, -54.4)],
)
def test_each_part_of_the_hand_over_goes_with_its_event(cause: str, from_ms: float, by_ms: float) -> None:
    """Loaded at once, noticed at once, not computed again: that cause goes, and no other changes."""
    trace = hand_over().shifted(from_ms, by_ms)
    if cause == "submit.wait":
        trace = changed(trace, stages.PROBED, b=ns(163.9 + by_ms))
    plain, without = causes_ms(hand_over().answer()), causes_ms(trace.answer())

    assert plain.pop(cause) + by_ms == pytest.approx(without.pop(cause, 0), abs=1e-6)
    assert without == pytest.approx(plain)


def test_findings_and_explain_tell_the_hand_overs_story(tmp_path: Path) -> None:
    """Ranked by what is at stake; without the probe's word nobody can say that the bytes were there before."""
    found = findings_of(tmp_path, run_of(hand_over))
    blind = lacking(run_of(hand_over), lambda e: e.stage == "transfer.probed")
    (tmp_path / "blind").mkdir()
    told = explained(tmp_path, hand_over())

    assert names(found) == ["decode.first_step", "submit.wait", "detection"]
    assert "D notices 28.1 ms after the KV has arrived" in found[2].sentence
    assert names(findings_of(tmp_path / "blind", blind)) == ["decode.first_step", "submit.wait"]
    assert "Its longest wait was submit.wait, 28.8 ms" in told
    assert "11 % transfer" in told


# vllm#45211 as measured in vllm#50913: posting slower, TTFT flat -----------------------------------------------------


def test_posting_got_slower_and_ttft_did_not() -> None:
    """6.7 ms of posting become 11.9 in a reader thread, the transfer 39.4 of 38.7, TTFT is the same."""
    main = next(a for a in read(6.7, 38.7, on_forward_thread=True).answers() if a.request.request_id == "r1")
    reader = next(a for a in read(11.9, 39.4, on_forward_thread=False).answers() if a.request.request_id == "r1")
    undone = next(a for a in read(6.7, 39.4, on_forward_thread=False).answers() if a.request.request_id == "r1")

    assert main.ttft_ns == reader.ttft_ns
    assert causes_ms(reader)["post"] - causes_ms(main)["post"] == pytest.approx(5.2)
    assert (reader.shares_ns["transfer"] - main.shares_ns["transfer"]) / MS == pytest.approx(0.7)
    assert causes_ms(main)["submit.wait"] - causes_ms(reader)["submit.wait"] == pytest.approx(0.7)
    assert causes_ms(undone)["post"] == causes_ms(main)["post"]


def test_the_forward_thread_charges_those_who_decode_beside() -> None:
    """vllm#35264. Posted on D's forward thread, r1's read makes r2's tokens later; off it, it costs r2 nothing."""
    on, off = (
        next(a.pace for a in read(6.7, 38.7, on_forward_thread=thread).answers() if a.request.request_id == "r2")
        for thread in (True, False)
    )

    assert on is not None
    assert off is not None
    assert on.blame_ns == {"r1": pytest.approx(6.7 * MS)}
    assert (on.extension_ns, off.extension_ns, off.blame_ns) == (7.7 * MS, 0, {})


# vllm#35264: 8 requests/s offered, 4.65 served by pull and 5.92 by push ----------------------------------------------


@pytest.mark.parametrize("served_hz", [4.65, 5.92])
def test_a_gap_in_ttft_that_is_queue_growth(tmp_path: Path, served_hz: float) -> None:
    """The hand-off takes the same 6 ms first and last; what grows is the queue at P, and no remedy is named."""
    trace = repeated(*queued(1_000 / served_hz - 3))
    answers = sorted(trace.answers(), key=lambda answer: answer.start_ns)
    found = findings_of(tmp_path, trace)

    assert names(found) == ["saturated"]
    assert f"Offered 8.00 requests/s, served {served_hz:.2f}" in found[0].sentence
    assert (found[0].kind, found[0].remedy) == ("", "")
    assert {answer.shares_ns["transfer"] for answer in answers} == {6 * MS}
    assert max(causes_ms(answers[-1]).items(), key=lambda item: item[1])[0] == "prefill.queue"
    assert "prefill.queue" not in causes_ms(answers[0])
    growth_ms = [total_ms(later) - total_ms(one) for one, later in pairwise(answers[5:])]
    assert growth_ms == pytest.approx([1_000 / served_hz - 125] * len(growth_ms))


def test_a_queue_is_one_also_while_it_is_there(tmp_path: Path) -> None:
    """Looked at after 5 s, when 40 have come and 23 have their answer: those behind them have not given up."""
    whole = repeated(*queued(1_000 / 4.65 - 3))
    cut = Trace()
    cut.events = [event for event in whole.events if event.t_ns <= START_NS + 5_000 * MS]

    assert "saturated" in names(findings_of(tmp_path, cut))


def test_a_run_that_keeps_up_is_not_saturated(tmp_path: Path) -> None:
    """The same P, served every 110 ms: nothing queues, nothing is found."""
    trace = repeated(*queued(107))

    assert not any("prefill.queue" in causes_ms(answer) for answer in trace.answers())
    assert "saturated" not in names(findings_of(tmp_path, trace))


def test_ttft_by_concurrency_is_queue_and_not_hand_off() -> None:
    """sglang#6411, dynamo#4425, dynamo#2552. The later a request comes to a full P the longer it waits, at one rate."""
    crowd = sorted(repeated(*queued(200, count=12, every_ms=1)).answers(), key=lambda answer: answer.start_ns)
    alone = queued(200, count=1)[0].answer()
    waited = [causes_ms(one).get("prefill.queue", 0) + causes_ms(one)["prefill.step_boundary"] for one in crowd]

    assert total_ms(crowd[0]) == total_ms(alone)
    assert [b - a for a, b in pairwise(waited)] == pytest.approx([202] * 11, abs=3)
    assert {answer.shares_ns["transfer"] for answer in crowd} == {alone.shares_ns["transfer"]}
    assert crowd[-1].shares_ns["compute.queue"] > 0.8 * (crowd[-1].ttft_ns or 0)


def test_ttft_by_concurrency_is_a_table(tmp_path: Path) -> None:
    """dynamo#2552, sglang#6411, dynamo#4425. In a crowd the queue grows with the number in flight, alone there is none.

    What is handed over takes as long either way.
    """

    def table(every_ms: float, path: Path) -> list[tuple[int, int, int, int, int]]:
        with Store.open(path / "run.duckdb", "write") as store:
            fill(store, repeated(*queued(200, count=12, every_ms=every_ms)))
            analyze(store)
        return [
            (row["in_flight_from"], row["requests"], round(row["compute_queue_ms"], -2), row["transfer_ms"],
             round(row["ttft_p50_ms"], -2))
            for row in ask(path / "run.duckdb", "ttft_by_concurrency")
        ]  # fmt: skip

    (tmp_path / "apart").mkdir()

    assert table(1, tmp_path) == [(1, 1, 0, 6, 200), (2, 2, 100, 6, 500), (4, 4, 700, 6, 1100), (8, 5, 1600, 6, 2100)]
    assert table(1_000, tmp_path / "apart") == [(1, 12, 0, 6, 200)]


# sglang#22853: +200 ms at 6 ms of transfer --------------------------------------------------------------------------


def test_a_router_that_waits_for_ps_reply(tmp_path: Path) -> None:
    answer = joined(200).answer()
    plain = joined(-24).answer()
    found = findings_of(tmp_path, run_of(lambda name: joined(200, name)))

    assert (total_ms(answer), total_ms(plain)) == (260, 60)
    assert (causes_ms(answer)["prefill.reply"], answer.shares_ns["transfer"]) == (200, 6 * MS)
    assert {name: ms for name, ms in causes_ms(answer).items() if name != "prefill.reply"} == causes_ms(plain)
    assert names(found) == ["router.waits"]
    assert "Answers go on only after P's reply, though D had made their first token before" in found[0].sentence
    assert "24 of 24 requests (push, scope router) wait so, 200 ms at the median" in found[0].sentence
    assert "77 % of the time to first token of all 24 together" in found[0].sentence
    assert found[0].grade == "supposed"


def test_without_ps_reply_the_same_delay_is_the_answers_way() -> None:
    """The deciding event: P's reply at 33 and the token at 260 leave the router and the network as what is known."""
    early = changed(joined(200), stages.ROUTER_PREFILL_RETURNED, t_ns=ns(33)).answer()

    assert (causes_ms(early)["decode.reply"], "prefill.reply" in causes_ms(early)) == (203, False)


# Claims to confirm or refute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire_ms", "top"), [(0, "coordination"), (4_000, "transfer")])
def test_likely_the_kv_transfer_is_confirmed_or_refuted(wire_ms: float, top: str) -> None:
    """Gist on Qwen3-32B-FP8: a guess at the transfer. In the hand-over it is a tenth; four seconds of wire prove it."""
    trace = hand_over().shifted(163, wire_ms)
    answer = changed(trace, stages.PROBED, b=ns(163.9 + wire_ms)).answer()
    answers = {"coordination", "transfer"}

    assert max(answers, key=lambda kind: answer.shares_ns[kind]) == top
    assert (answer.transfer_low_ns > 0.5 * (answer.ttft_ns or 0)) == (top == "transfer")


def _half_late(name: str) -> Trace:
    return push(74, name) if int(name[1:]) % 2 else push(4, name)


def test_how_many_registrations_come_late(tmp_path: Path) -> None:
    """vllm-project/router#187, vllm#55088. Half of the requests find P waiting; none does where all come in time."""
    found = findings_of(tmp_path, run_of(_half_late))
    (tmp_path / "plain").mkdir()

    (late,) = (one for one in found if one.name == "registration.late")
    assert late.sentence == (
        "Registrations arrive late in 50 % of 24 push requests, by 45.0 ms at the median, most of it waiting for D's "
        "sender thread."
    )
    assert findings_of(tmp_path / "plain", run_of(lambda name: push(4, name))) == []


def test_long_posts_of_many_descriptors_are_found(tmp_path: Path) -> None:
    """vllm#55434, vllm#35264. 40 ms of posting 112,000 descriptors; the same wire behind a short post is no finding."""

    def many(name: str) -> Trace:
        return changed(pull(name).shifted(39.5, 40), stages.POST_ENDED, c=112_000)

    (found,) = findings_of(tmp_path, run_of(many))
    (tmp_path / "few").mkdir()

    assert (found.name, "with 112,000 descriptors of 12 bytes" in found.sentence) == ("post.descriptors", True)
    assert findings_of(tmp_path / "few", run_of(lambda name: changed(pull(name), stages.POST_ENDED, c=118))) == []


def test_load_is_told_by_the_run_itself(tmp_path: Path) -> None:
    """Failures are no saturation: what failed asks for no answer any more."""
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, run_of(pull))
        analyze(store)
        kept_up = population.load(store, {})
        store.execute("UPDATE request SET verdict = 'failed' WHERE request_id < 'r004'")
        failing = population.load(store, {})
        found = checks.findings(gather.gather(store, failing))

    assert kept_up is not None
    assert failing is not None
    assert (kept_up["saturated"], failing["saturated"]) == (False, False)
    assert names(found) == ["failed"]
