"""Waiting for a place, for blocks, for a thread, for a first contact: told apart, and idleness charged to nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtrace import division, stages
from kvtrace.analyze import analyze
from kvtrace.evidence import Timeline
from kvtrace.model import Attribution, Step
from kvtrace.occupancy import Held, Occupancy, Span
from kvtrace.store import Store
from tests.asked import ask
from tests.field.scenes import (
    D_LEG,
    P_LEG,
    changed,
    going_on,
    lacking,
    occupant,
    passed_over,
    repeated,
    waited_ms,
)
from tests.test_analyze import fill
from tests.trace import MS, PROCESSES, D, P, Trace, causes_ms, ns, pull, push


def test_budget_slots_and_blocks_are_told_apart() -> None:
    """vllm#41784, vllm#42568, vllm#55724. Step 5 passes the request over; what it did tells what was short."""
    budget = passed_over(tokens=2048, requests=3).answer()
    slots = passed_over(tokens=16, requests=16).answer()
    (blocks,) = (a for a in repeated(passed_over((36.1,)), occupant("o", 900, waits=False)).answers() if a.segments)

    turn = {"the scheduler's next turn": 1}
    assert waited_ms(budget, "decode.queue") == pytest.approx(
        {"the token budget: step 5 takes 2,048 tokens of 3 requests": 29.8} | turn
    )
    assert waited_ms(slots, "decode.queue") == pytest.approx(
        {"a batch slot: step 5 makes tokens of 16 requests": 29.8} | turn
    )
    assert waited_ms(blocks, "decode.queue") == pytest.approx(
        {"KV blocks: computing requests hold 900, those that wait for KV 0": 29.8} | turn
    )


def test_the_schedulers_limits_say_what_was_full() -> None:
    """vllm#42568. 2,048 tokens of three requests fill the budget of one engine and leave room in another's."""

    def waited_for(tokens: int, requests: int, most: tuple[int, int]) -> str:
        trace = passed_over(tokens=tokens, requests=requests)
        processes = {**PROCESSES, D: replace(PROCESSES[D], max_tokens=most[0], max_requests=most[1])}
        (answer,) = trace.answers(processes)
        assert answer.shares_ns == trace.answer().shares_ns
        return next(what for what in waited_ms(answer, "decode.queue") if "step 5" in what)

    takes = "step 5 takes 2048 of 2048 tokens and 3 of 16 requests"
    assert waited_for(2048, 3, (2048, 16)) == f"the token budget: {takes}"
    assert waited_for(2048, 3, (8192, 3)) == "a batch slot: step 5 takes 2048 of 8192 tokens and 3 of 3 requests"
    assert waited_for(2048, 3, (8192, 16)) == "a place: step 5 takes 2048 of 8192 tokens and 3 of 16 requests"
    assert waited_for(16, 16, (16, 16)).startswith("the token budget and a batch slot: ")
    assert waited_for(2048, 3, (0, 0)) == "the token budget: step 5 takes 2,048 tokens of 3 requests"


def test_an_engine_with_two_schedulers_of_other_limits_has_none() -> None:
    """A restart with other flags: which of the two made a step up is not asked, and the step itself is what is left."""
    one = replace(PROCESSES[D], max_tokens=2048, max_requests=16)
    same, other = (replace(one, process=9, max_requests=most) for most in (16, 32))
    trace = passed_over(tokens=2048, requests=3)

    told = [trace.answers({**PROCESSES, D: one, 9: two})[0] for two in (same, other)]

    assert ["of 2048 tokens" in " ".join(waited_ms(answer, "decode.queue")) for answer in told] == [True, False]


def test_a_core_that_the_forward_thread_shares_is_told(tmp_path: Path) -> None:
    """vllm#53636. At four of five looks others ran on its CPU, NIXL's at three; elsewhere it has the core to itself."""

    def told(trace: Trace, path: Path) -> list[tuple[object, ...]]:
        with Store.open(path, "write") as store:
            fill(store, trace)
            analyze(store)
        names = ("engine", "looks", "shared", "shared_share", "beside_most", "beside", "cpus")
        return [tuple(row[name] for name in names) for row in ask(path, "cores")]

    trace = pull()
    for at_ms, names in ((10, "nixl:python"), (1010, "hasher,nixl:python"), (2010, ""), (3010, "hasher")):
        beside = len(names.split(",")) if names else 0
        trace.at(at_ms, stages.PLACED, "", 3, beside, beside, 40, ref=names, process=D)
    trace.at(4010, stages.PLACED, "", 3, 1, 1, 40, ref="nixl:python", process=D)

    (row,) = told(trace, tmp_path / "shared.duckdb")
    assert row == ("engine-d", 5, 4, 0.8, 2, "nixl:python 3, hasher 2", 1)
    alone = changed(trace, stages.PLACED, b=0, ref="")
    assert told(alone, tmp_path / "alone.duckdb") == [("engine-d", 5, 0, 0, 0, None, 1)]


def test_a_core_that_something_else_takes_is_no_computing(tmp_path: Path) -> None:
    """vllm#53636. P's forward of 20 ms takes 40 where its thread has half of its core; the model computes for 20."""
    shared = pull().shifted(20, 20)
    told = repeated(shared, Trace().at(50.5, stages.WORKER_STARVED, "", 1, 0, 20 * MS, 0, process=P))
    alone, untold, told_ = (trace.answer() for trace in (pull(), shared, told))

    assert causes_ms(untold)["prefill.forward"] == 40
    assert causes_ms(told_) == {**causes_ms(alone), "processor.wait": 20}
    assert told_.shares_ns["compute.run"] == alone.shares_ns["compute.run"]
    assert waited_ms(told_, "processor.wait") == {"a processor for the thread that works on step 1": 20}
    with Store.open(tmp_path / "shared.duckdb", "write") as store:
        fill(store, told)
        analyze(store)
    (on_p,) = (row for row in ask(tmp_path / "shared.duckdb", "steps") if row["engine"] == "engine-p")
    assert (on_p["worker_starved_s"], on_p["forward_p50_ms"]) == (0.02, 40)


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


def test_finished_requests_hold_blocks_on_p() -> None:
    """What a lease keeps on P while nothing computes is coordination, and named; without a lease nobody is to blame."""
    trace = push().shifted(3.9, 20, only=_but(stages.DECODE_ALLOCATED, stages.REGISTRATION_QUEUED))
    for at_ms in (3.1, 13.2, 23.3):
        trace.at(at_ms, stages.PREFILL_CONSIDERED, P_LEG)
    lease = Trace().at(1, stages.PREFILL_ALLOCATED, "o", 900).at(2, stages.PREFILL_FINISHED, "o", 900, 1)
    held, free = (next(a for a in repeated(trace, *others).answers() if a.segments) for others in ((lease,), ()))

    assert causes_ms(held)["prefill.capacity"] == pytest.approx(20, abs=0.2)
    assert "prefill.capacity" not in causes_ms(free)


def _but(*wanted: stages.Stage) -> list[str]:
    return [stage.name for stage in stages.STAGES if stage not in wanted]


def test_an_engine_that_sleeps_though_work_is_ready_is_nobodys() -> None:
    """local-inference-lab/vllm#191. The load fails at 44 and D makes its next step two minutes later."""
    trace = pull().without("decode.reported", "decode.ready", "transfer.done")
    trace.at(43, stages.TRANSFER_FAILED, D_LEG, 7, ref="ERR").at(44, stages.LOAD_FAILED, D_LEG, 0, 38)
    trace = changed(trace, stages.DECODE_SCHEDULED, b=600, c=0)
    awake, asleep = trace.answer(), trace.shifted(45.5, 120_000).answer()

    assert causes_ms(asleep).get("unattributed", 0) - causes_ms(awake).get("unattributed", 0) == 120_000
    assert asleep.shares_ns["transfer"] == awake.shares_ns["transfer"]
    assert asleep.shares_ns["compute.run"] == awake.shares_ns["compute.run"]


def test_the_first_request_after_idleness_says_how_long_that_was() -> None:
    """vllm#31602. P made its last step ten seconds before; with a step a moment before there is nothing to say."""
    trace = push().later(10_100)
    idle = trace.step(P, 1, (90, 91, 98, 99, 100)).answer()
    busy = going_on(trace, P, 10_100).answer()

    assert idle.idle_ns == 10_003 * MS
    assert "the engine had made no step for 10.0 s" in idle.note
    assert (busy.idle_ns, busy.note) == (3 * MS, "")


def test_the_engine_that_was_idle_is_the_one_the_request_came_to_first() -> None:
    """By push D is asked as well: it has the request at 2.5, and made its last step ten seconds before."""
    trace = push().later(10_100).step(D, 1, (90, 91, 98, 99, 100))
    trace = going_on(trace, P, 10_100).shifted(10_102.9, -0.5, only=["decode.enqueued"])

    assert trace.answer().idle_ns == 10_002.5 * MS
    assert trace.without("decode.enqueued").answer().idle_ns == 3 * MS


# Threads and first contacts ---------------------------------------------------------------------------------


def behind(other: str) -> Trace:
    """Return a push whose blocks P's sender, awake since 32, picks up at 74: it posts for another from 34 to 72."""
    trace = push().without("sender.woke").shifted(33.9, 40).at(32, stages.SENDER_WOKE, process=P)
    trace.at(33.5, stages.PREPARED, other, 5, 9, process=P).at(34, stages.POST_STARTED, other, 5, process=P)
    return trace.at(72, stages.POST_ENDED, other, 5, 9_000_000, 9, process=P)


def test_a_sender_busy_with_anothers_post_says_whose() -> None:
    """The thread posts for `o` while these blocks wait; without that post it is busy with nobody knows what."""
    trace = behind("cmpl-o-0-cccccccc")
    answer = next(a for a in trace.answers() if a.request.request_id == "r1")
    unnamed = lacking(trace, lambda e: "cmpl-o" in e.request).answer()

    assert waited_ms(answer, "writer.busy")["the post of o"] == 38
    assert waited_ms(unnamed, "writer.busy") == {"the sender thread's other work": 42}


def test_a_long_post_is_named_though_shorter_ones_came_behind_it() -> None:
    """Two other threads of P's worker post for others at 35..36 and 36..37, while these blocks wait from 50 on."""
    trace = behind("cmpl-o-0-cccccccc").shifted(32.5, 17, only=["prefill.staged"])
    for number, at_ms in ((8, 35), (9, 36)):
        other = f"cmpl-o{number}-0-dddddddd"
        trace.at(at_ms, stages.PREPARED, other, number, 9, process=P)
        trace.at(at_ms, stages.POST_STARTED, other, number, process=P)
        trace.at(at_ms + 1, stages.POST_ENDED, other, number, 9_000, 9, process=P)
    answer = next(a for a in trace.answers() if a.request.request_id == "r1")

    assert waited_ms(answer, "writer.busy")["the post of o"] == 22


def test_a_thread_that_was_asleep_meanwhile_was_not_busy() -> None:
    """Had the thread slept until 72, the same wait would be its waking."""
    asleep = changed(lacking(behind("o"), lambda e: e.request == "o"), stages.SENDER_WOKE, t_ns=ns(72)).answer()

    assert causes_ms(asleep)["writer.wake"] == 39
    assert causes_ms(asleep)["writer.busy"] == 3


def test_a_thread_that_was_never_seen_to_wake_is_not_said_to_sleep() -> None:
    """What a vLLM without the thread's private members leaves of a wait of 42 ms is unattributed, and no remedy's."""
    unseen = push().without("sender.woke", "sender.slept").shifted(33.9, 40).answer()
    causes = causes_ms(unseen)

    assert "writer.wake" not in causes
    assert "writer.busy" not in causes
    assert causes["unattributed"] == 42


def _shake(trace: Trace, peer: str, start_ms: float, end_ms: float) -> Trace:
    trace.at(start_ms, stages.HANDSHAKE_STARTED, process=P, ref=peer)
    return trace.at(end_ms, stages.HANDSHAKE_ENDED, "", 0, 1, process=P, ref=peer)


def test_a_handshake_behind_anothers_handshake() -> None:
    """vllm#48633. P shakes hands with engine-d2 from 35.1 to 75 and only then with engine-d."""
    plain = push().shifted(35.2, 45)
    both = _shake(_shake(plain, "engine-d2", 35.1, 75), "engine-d", 75, 80).answer()
    own = _shake(push().shifted(35.2, 45), "engine-d", 75, 80).answer()

    assert waited_ms(both, "handshake") == {
        "agent metadata of engine-d2, ahead of engine-d's": pytest.approx(39.9), "agent metadata of engine-d": 5
    }  # fmt: skip
    assert waited_ms(own, "handshake") == {"agent metadata of engine-d": 5}
    assert causes_ms(own)["prepare"] - causes_ms(both)["prepare"] == pytest.approx(39.9)


def test_a_first_contact_while_p_computes_is_hidden() -> None:
    """neuralmagic/vllm#63. From 5 to 25 it costs nothing and has 10.5 ms to spare; from 35.2 on it is on the path."""
    hidden = _shake(push(), "engine-d", 5, 25).answer()
    paid = _shake(push().shifted(35.2, 20), "engine-d", 35.2, 55.2).answer()

    assert [(h.duration_ns, h.slack_ns) for h in hidden.hidden if h.cause == "handshake"] == [(20 * MS, 10.5 * MS)]
    assert (hidden.ttft_ns, "handshake" in causes_ms(hidden)) == (60 * MS, False)
    assert (paid.ttft_ns, causes_ms(paid)["handshake"]) == (80 * MS, 20)
    assert [h for h in paid.hidden if h.cause == "handshake"] == []
