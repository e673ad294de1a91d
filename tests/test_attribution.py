"""The reference walk on traces that a reader can add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtrace import stages
from kvtrace.model import Process
from tests.trace import D_API, MS, PROCESSES, ROUTER, D, P, Trace, causes_ms, check_tiles, pull, push

PUSH_CAUSES = {
    "router.decide": 0.5, "router.dispatch": 0.5, "prefill.hop": 1, "prefill.frontend": 1, "prefill.step_boundary": 1,
    "prefill.launch": 6, "prefill.forward": 20, "prefill.sample": 1, "stage.wait": 2, "writer.wake": 0.5,
    "writer.busy": 1.5, "prepare": 1,
    "post": 2, "wire": 4, "report": 3, "decode.step_boundary": 1, "decode.launch": 0.5,
    "decode.first_step": 5.5, "decode.sample": 1.5, "step.connector": 0.5, "decode.frontend": 3, "decode.reply": 3,
}  # fmt: skip


def test_push_in_time_adds_up() -> None:
    """Every millisecond of a tidy push hand-off is where the trace put it."""
    answer = push().answer()

    assert causes_ms(answer) == pytest.approx(PUSH_CAUSES)
    assert answer.ttft_ns == 60 * MS
    assert (answer.verdict, answer.scope, answer.request.mode, answer.request.join_method) == (
        "complete",
        "router",
        "push",
        "matched",
    )


def test_registration_in_time_is_hidden_with_its_slack() -> None:
    """A registration that takes longer but is in time leaves the path alone; its slack is counted from the sending."""
    early, later = push(4).answer(), push(24).answer()

    assert causes_ms(early) == causes_ms(later)
    hidden = [{h.cause: h for h in answer.hidden}["registration"] for answer in (early, later)]
    assert [h.duration_ns / MS for h in hidden] == [3, 23]
    # least message time 1 ms (sent 4, received 5; sent 24, received 25); P had computed at 30
    assert [h.slack_ns / MS for h in hidden] == [25, 5]
    assert [answer.registration_late_ns for answer in (early, later)] == [-25 * MS, -5 * MS]


def test_a_thread_that_slept_tells_nothing_about_the_message() -> None:
    """P's sender woke at 4.9, after the registration was sent at 4: how long the message took is not known."""
    trace = push(4).at(4.9, stages.SENDER_WOKE, process=P).at(5.1, stages.SENDER_SLEPT, process=P)

    assert trace.answer().registration_late_ns == -26 * MS


def test_late_registration_is_on_the_path_and_nothing_else_changes() -> None:
    """Sent at 74 and readable at 75, the registration keeps P waiting from 34 on; every other cause stays."""
    answer = push(74).answer()
    causes = causes_ms(answer)

    assert causes["registration.late"] == 41
    assert answer.registration_late_ns == 45 * MS
    late = {name: ms for name, ms in causes.items() if name != "registration.late"}
    assert late == pytest.approx({**PUSH_CAUSES, "writer.busy": 0.5})


def test_sender_asleep_is_not_the_registrations_fault() -> None:
    """The registration came at 5 but the sender slept until 75: that is the thread's waking."""
    trace = push().shifted(33.2, 40).without("sender.woke")
    trace.at(73.5, stages.SENDER_WOKE, process=P)
    causes = causes_ms(trace.answer())

    assert causes["writer.wake"] == 40.5
    assert "registration.late" not in causes


def test_pull_adds_up() -> None:
    """In pull the way back through the router is on the path."""
    answer = pull().answer()
    causes = causes_ms(answer)

    assert answer.ttft_ns == 60 * MS
    expected = {"prefill.reply": 1, "router.dispatch": 1.5, "decode.hop": 1, "submit.wait": 1, "post": 1, "wire": 3}
    assert {name: causes[name] for name in expected} == expected
    assert (answer.verdict, answer.request.mode, answer.request.join_method) == (
        "complete",
        "pull",
        "remote_request_id",
    )


def test_router_delay_before_the_decode_leg_is_named() -> None:
    """40 ms more in the router before D's leg are router.dispatch and nothing else."""
    plain, delayed = causes_ms(pull().answer()), causes_ms(pull(dispatch_ms=41).answer())

    assert delayed.pop("router.dispatch") - plain.pop("router.dispatch") == pytest.approx(40)
    assert delayed == pytest.approx(plain)


def test_wire_ends_as_early_as_the_fastest_of_the_pair_allows() -> None:
    """A second transfer of that size took 7 ms from post to sign; the slow one's rest is detection."""
    slow = pull("slow").shifted(40.5, 30)
    slow.events += pull("fast").later(1_000).events
    by_id = {answer.request.request_id: answer for answer in slow.answers()}

    assert causes_ms(by_id["fast"])["wire"] == 3
    slow_causes = causes_ms(by_id["slow"])
    assert (slow_causes["wire"], slow_causes["detection"]) == (3, 30)
    assert (by_id["slow"].transfer_low_ns, by_id["slow"].transfer_high_ns) == (1 * MS, 34 * MS)


def test_last_pending_poll_bounds_the_wire_from_below() -> None:
    """A poll that said in progress at 42.5 proves that the bytes were not there before."""
    trace = pull().without("transfer.done")
    trace.at(43, stages.TRANSFER_DONE, "cmpl-r1-0-bbbbbbbb", 7, 42_500_000 + 10**18, 3, process=D)
    answer = trace.answer()

    assert answer.transfer_low_ns == 3.5 * MS


@pytest.mark.parametrize("stopped_ms", [45.5, 31.4])
def test_engine_stopped_between_steps_is_unattributed(stopped_ms: float) -> None:
    """D's core stopped after the KV was ready, or P's after it had finished: one turn is the scheduler's, no more."""
    causes = causes_ms(push().shifted(stopped_ms, 40).answer())

    assert causes.pop("unattributed") == pytest.approx(40, abs=0.6)
    assert causes == pytest.approx(PUSH_CAUSES, abs=0.6)


def test_no_handoff_is_a_verdict() -> None:
    """D was told of no remote KV and prefilled the prompt itself."""
    trace = pull().without(
        *[
            s.name
            for s in stages.STAGES
            if s.name.startswith(("transfer.", "decode.load", "decode.reported", "decode.ready"))
        ]
    )
    trace.events = [event._replace(c=0) if event.stage == "decode.enqueued" else event for event in trace.events]
    answer = trace.answer()

    assert answer.verdict == "no handoff"
    assert sum(answer.shares_ns.values()) == answer.ttft_ns


@pytest.mark.parametrize(
    "missing", ["prefill.enqueued", "decode.ready", "transfer.done", "decode.enqueued", "decode.reported"]
)
def test_missing_evidence_is_incomplete_and_never_a_guess(missing: str) -> None:
    """Without its deciding event the hand-off is incomplete; the shares still sum."""
    trace = pull().without(missing)
    answer = trace.answer() if missing != "decode.enqueued" else max(trace.answers(), key=lambda a: a.ttft_ns or 0)

    assert answer.verdict == "incomplete"
    assert sum(answer.shares_ns.values()) == answer.ttft_ns


@pytest.mark.parametrize(
    ("stage", "verdict"),
    [
        (stages.ROUTER_CANCELLED, "aborted"),
        (stages.ROUTER_FAILED, "failed"),
        (stages.LEASE_EXPIRED, "expired"),
        (stages.TRANSFER_FAILED, "failed"),
    ],
)
def test_requests_that_end_without_a_token_have_a_verdict(stage: stages.Stage, verdict: str) -> None:
    """No first token, one deciding event."""
    trace = pull().without("router.first_token", "decode.first_token_out", "decode.scheduled")
    request = {stages.LEASE_EXPIRED: "cmpl-r1-0-aaaaaaaa", stages.TRANSFER_FAILED: "cmpl-r1-0-bbbbbbbb"}.get(
        stage, "r1"
    )
    trace.at(80, stage, request)
    answer = trace.answer()

    assert (answer.verdict, answer.ttft_ns) == (verdict, None)


def test_one_id_many_requests_stay_apart() -> None:
    """Fifty hand-offs whose router ids differ only at the end are fifty requests, each complete."""
    trace = Trace()
    for index in range(50):
        trace.events += push(name=f"kvt-{index:032x}").later(index * 100, index * 20).events
    answers = trace.answers()

    assert len(answers) == 50
    assert {answer.verdict for answer in answers} == {"complete"}
    assert {answer.ttft_ns for answer in answers} == {60 * MS}


def test_two_hosts_mark_the_segments_between_them() -> None:
    """Time between processes of two clock domains rests on wall anchors, and says so."""
    processes = {**PROCESSES, P: Process(P, "core", "engine-p", "host-b")}
    (answer,) = push().answers(processes)
    crossing = {segment.cause for segment in answer.segments if segment.crosses_hosts}

    assert {"prefill.frontend", "wire"} & crossing
    assert "decode.reply" not in crossing


@pytest.mark.parametrize("lost", ["router.first_token", "router.received"])
def test_no_request_ends_before_its_first_token_or_its_start(lost: str) -> None:
    """The router's clock is 1 s behind the engines', and one of its points was not recorded."""
    trace = push().without(lost)
    trace.events = [e._replace(t_ns=e.t_ns - 1000 * MS) if e.process == ROUTER else e for e in trace.events]
    answer = trace.answer()

    assert answer.end_ns >= (answer.first_token_ns or 0)
    assert answer.end_ns >= answer.start_ns


def test_clocks_that_put_the_token_before_the_start_are_named() -> None:
    """D's clock is 1 s behind and the router's first token was not recorded: seen at 57, it is stamped -943."""
    trace = push().without("router.first_token")
    apart = Trace()
    apart.events = [e._replace(t_ns=e.t_ns - 1_000 * MS) if e.process in (D, D_API) else e for e in trace.events]
    processes = {**PROCESSES, **{one: replace(PROCESSES[one], domain="host-b") for one in (D, D_API)}}
    (answer,) = apart.answers(processes)
    (unseen,) = apart.without("decode.first_token_out", "decode.scheduled").answers(processes)

    assert (answer.verdict, answer.ttft_ns, answer.segments) == ("complete", None, ())
    assert answer.note == (
        "its first token is stamped 943 ms before its start: the clocks of two hosts disagree by more than that, "
        "so no TTFT can be told"
    )
    assert unseen.note.startswith("no first token was recorded")


def test_first_contact_is_the_handshake_and_not_the_preparing() -> None:
    """P shakes hands with D between match and descriptors: 40 ms that the pair pays once."""
    trace = push().shifted(35.2, 40)
    trace.at(35.2, stages.HANDSHAKE_STARTED, process=P, ref="engine-d")
    trace.at(75.2, stages.HANDSHAKE_ENDED, "", 0, 1, process=P, ref="engine-d")
    causes = causes_ms(trace.answer())

    assert causes["handshake"] == pytest.approx(40)
    assert causes["prepare"] == pytest.approx(1)


def test_connector_time_before_a_forward_is_no_computing() -> None:
    """Where loads precede the forward, P's only step waits 3 ms for its connector before it computes for 17."""
    trace = push().without("step.connected")
    trace.at(30.5, stages.STEP_CONNECTED, "", 1, 0, 3 * MS, 3 * MS, process=P)
    causes = causes_ms(trace.answer())

    assert causes["prefill.forward"] == 17
    assert causes["step.connector"] == 3


def test_connector_time_beyond_the_computing_does_not_break_the_tiles() -> None:
    """The connector says that it took 25 ms before the forward of a chunk, 10 ms longer than all chunks took."""
    trace = push().without("prefill.scheduled").without("step.scheduled", "step.started", "step.connected")
    p = "cmpl-r1-0-aaaaaaaa"
    trace.at(4, stages.PREFILL_SCHEDULED, p, 1, 300, 0, 600).at(20, stages.PREFILL_SCHEDULED, p, 3, 300, 300, 600)
    trace.step(P, 1, (4, 15, 17, 17.5, 18), tokens=300, connector_ms=25, before_ms=25)
    trace.step(P, 3, (20, 21, 30, 30.5, 31), tokens=300)

    check_tiles(trace)
    assert causes_ms(trace.answer())["step.connector"] <= 16


def _one_leg_after_the_other() -> Trace:
    """Return a push whose D was sent its leg at 34, when P's reply was back; its registration came at 75."""
    to_decode = ("router.decode_sent", "decode.http_received", "decode.enqueued", "decode.allocated")
    return push(74).shifted(0, 33, only=(*to_decode, "decode.registration_queued"))


def _joined() -> Trace:
    """Return a push whose router passes the answer on only when P's reply is back, at 72."""
    return push().shifted(60, 15).shifted(32, 39, only=("prefill.http_responded", "router.prefill_returned"))


@pytest.mark.parametrize("trace", [_one_leg_after_the_other(), _joined()])
def test_a_reply_that_was_waited_for_is_not_beside_the_path(trace: Trace) -> None:
    """D's leg, or the answer, waits for P's reply: it has no slack, and what it costs is on the path already."""
    check_tiles(trace)

    assert "prefill.return" in {hidden.cause for hidden in push().answer().hidden}
    assert "prefill.return" not in {hidden.cause for hidden in trace.answer().hidden}


def test_a_poll_that_the_path_rests_on_is_not_beside_it() -> None:
    """D's notification was not seen, so the path takes P's poll for the first sign of completion."""
    answer = push().without("transfer.notified").answer()

    assert causes_ms(answer)["wire"] == 5
    assert "sender.poll" not in {hidden.cause for hidden in answer.hidden}


def test_a_length_that_nobody_told_is_unknown_and_not_0() -> None:
    """A client may leave its lengths out, and a router does not count tokens."""
    of_client = Trace().at(0, stages.CLIENT_SENT, "r1", 0, process=ROUTER).at(9, stages.CLIENT_DONE, "r1", 0)
    counted = Trace().at(0, stages.CLIENT_SENT, "r1", 600, process=ROUTER).at(9, stages.CLIENT_DONE, "r1", 5)
    of_router = Trace().at(0, stages.ROUTER_RECEIVED, "r1").at(9, stages.ROUTER_FIRST_TOKEN, "r1")
    lengths = [(one.prompt_tokens, one.output_tokens) for one in (t.answer() for t in (of_client, counted, of_router))]

    assert lengths == [(None, None), (600, 5), (None, None)]
