"""The reference walk where the kernel says that a thread had no processor."""

from __future__ import annotations

import pytest

from kvtrace import stages
from kvtrace.model import Attribution
from tests.trace import MS, D, P, Trace, causes_ms, pull, push


@pytest.mark.parametrize("starved_ms", [0, 5, 60])
def test_a_scheduler_without_a_processor_waits_for_one_and_stopped_it_does_not(starved_ms: float) -> None:
    """D's core pauses for 40.8 ms behind the step in which the KV was ready: 4 are its turn, more what it starved."""
    trace = push().shifted(45.5, 40).step(D, 4, (44, 44, 0, 44.4, 45.2), tokens=0)
    trace.events = [
        event._replace(b=round(starved_ms * MS)) if (event.stage, event.process) == ("step.ended", D) else event
        for event in trace.events
    ]
    answer = trace.answer()
    causes = causes_ms(answer)
    told = [one.waited_for for one in answer.segments if one.cause == "decode.step_boundary"]

    explained_ms = min(36.8, starved_ms)
    assert causes.get("unattributed", 0) == pytest.approx(36.8 - explained_ms)
    assert causes["decode.step_boundary"] == pytest.approx(0.2 + 4 + explained_ms)
    assert any("no processor was free" in one for one in told) == (starved_ms > 0)


@pytest.mark.parametrize(
    ("lacked_ms", "told"),
    [
        ((8, 0, 0), {"prefill.forward": 12, "processor.wait": 8}),
        ((50, 0, 0), {"processor.wait": 20}),
        ((0, 0.3, 0), {"step.connector": 0.7, "processor.wait": 0.3}),
        ((0, 0, 0.4), {"prefill.sample": 0.1, "processor.wait": 0.4}),
        ((0, 0, 9), {"processor.wait": 0.5}),
        ((-5, -5, -5), {}),
    ],
    ids=["forward", "all of it", "connector", "result", "all of the result", "nonsense"],
)
def test_a_worker_without_a_processor_does_not_compute(
    lacked_ms: tuple[float, float, float], told: dict[str, float]
) -> None:
    """P's forward of 20 ms, half a millisecond of the connector behind it, and half a millisecond to take in."""
    forward_ns, connector_ns, result_ns = (round(one * MS) for one in lacked_ms)

    def connecting(trace: Trace) -> Trace:
        trace.events = [
            event._replace(c=MS // 2, d=0) if (event.stage, event.a) == ("step.connected", 1) else event
            for event in trace.events
        ]
        return trace

    plain, trace = connecting(push()), connecting(push())
    trace.at(30.5, stages.WORKER_STARVED, "", 1, 0, forward_ns, connector_ns, process=P)
    trace.at(31, stages.RESULT_STARVED, "", 1, 0, result_ns, process=P)
    before, answer = causes_ms(plain.answer()), trace.answer()
    causes = causes_ms(answer)

    gone = {name for name in before if name not in causes}
    changed = {name: causes[name] for name in causes if causes[name] != pytest.approx(before.get(name))}
    assert changed == pytest.approx(told)
    assert gone <= {"prefill.forward", "prefill.sample"}
    waited_for = {one.waited_for for one in answer.segments if one.cause == "processor.wait"}
    assert waited_for == ({"a processor for the thread that works on step 1"} if told else set())


@pytest.mark.parametrize(
    ("mode", "stage", "numbers", "told"),
    [
        ("push", stages.POST_STARVED, (7, 1.5), {"post": 0.5, "processor.wait": 1.5}),
        ("push", stages.POST_STARVED, (8, 1.5), {}),
        ("pull", stages.POST_STARVED, (7, 5), {"processor.wait": 1}),
        ("push", stages.NOTICE_STARVED, (0, 1.5, 2), {"detection": 0.5, "processor.wait": 1.5}),
        ("push", stages.NOTICE_STARVED, (0, 1.5, 3), {"detection": 1.5, "processor.wait": 0.5}),
        ("push", stages.NOTICE_STARVED, (0, 1.5, 9), {}),
        ("pull", stages.NOTICE_STARVED, (0, 1.5, 2), {"detection": 0.5, "processor.wait": 1.5}),
    ],
    ids=["a post", "another post", "all of a post", "a look", "since a look before", "long since", "its own look"],
)
def test_a_thread_without_a_processor_neither_posts_nor_looks(
    mode: str, stage: stages.Stage, numbers: tuple[int, ...], told: dict[str, float]
) -> None:
    """A post of 2 ms in push, 1 in pull; the KV came 2 ms before it was noticed, and the bracket says so as before."""

    def trace(name: str, *, fast: bool) -> Trace:
        made = push(name=name) if mode == "push" else pull(name)
        return made if fast else made.shifted(41.5 if mode == "push" else 42.5, 2)

    slow = trace("slow", fast=False)
    slow.events += trace("fast", fast=True).later(1_000).events
    side = P if mode == "push" else D
    at_ms = {"push": (38, 44), "pull": (40, 45)}[mode][stage is stages.NOTICE_STARVED]
    leg = "aaaaaaaa" if stage is stages.POST_STARVED and mode == "push" else "bbbbbbbb"
    payload = (numbers[0], *(round(one * MS) for one in numbers[1:]))

    def answer() -> Attribution:
        return next(one for one in slow.answers() if one.request.request_id == "slow")

    before = answer()
    slow.at(at_ms, stage, f"cmpl-slow-0-{leg}", *payload, process=D if stage is stages.NOTICE_STARVED else side)
    after = answer()
    causes = causes_ms(after)

    assert {name: ms for name, ms in causes.items() if ms != pytest.approx(causes_ms(before).get(name))} == told
    moved_ns = before.shares_ns["transfer"] - after.shares_ns["transfer"]
    assert moved_ns == (told.get("processor.wait", 0) * MS if stage is stages.POST_STARVED else 0)
    bounds = (before.transfer_low_ns - moved_ns, before.transfer_high_ns - moved_ns)
    assert (after.transfer_low_ns, after.transfer_high_ns) == bounds


@pytest.mark.parametrize(
    ("ordered_ms", "sample_ms", "wait_ms"), [(0, 0.5, 2.5), (2.5, 0.5, 2.5), (1, 2, 1), (0.2, 2.8, 0.2)]
)
def test_a_worker_that_is_not_told_to_sample_lacks_the_order_and_no_processor(
    ordered_ms: float, sample_ms: float, wait_ms: float
) -> None:
    """Computed at 30, through at 30.5, no processor until 33; told to sample so long before, 0: nobody saw."""
    plain, trace = (
        push().shifted(31, 2).at(33, stages.RESULT_STARVED, "", 1, 0, lacked_ns, process=P)
        for lacked_ns in (0, round(2.5 * MS))
    )
    trace.events = [
        event._replace(c=round(ordered_ms * MS)) if (event.stage, event.a) == ("step.ended", 1) else event
        for event in trace.events
    ]
    before, causes = causes_ms(plain.answer()), causes_ms(trace.answer())

    assert before["prefill.sample"] == 3
    assert causes["prefill.sample"] == pytest.approx(sample_ms)
    assert causes["processor.wait"] == pytest.approx(wait_ms)


def test_of_two_ranks_the_one_that_had_no_processor_for_longest_counts() -> None:
    """The others wait for it in every layer: what they lacked beside it made nothing longer that is known."""
    trace = push().at(30.5, stages.WORKER_STARVED, "", 1, 0, 3 * MS, 0, process=P)
    trace.at(30.5, stages.WORKER_STARVED, "", 1, 1, 8 * MS, 0, process=P)

    assert causes_ms(trace.answer())["processor.wait"] == 8


def test_what_a_thread_lacked_behind_the_requests_end_in_a_step_is_not_its() -> None:
    """P is done with the request at 31 and with the step at 33: of 2.3 ms without a processor 2 fit behind it."""
    trace = push().at(33, stages.RESULT_STARVED, "", 1, 0, round(2.3 * MS), process=P)
    trace.events = [
        event._replace(t_ns=event.t_ns + 2 * MS) if (event.stage, event.a) == ("step.ended", 1) else event
        for event in trace.events
    ]

    assert causes_ms(trace.answer())["processor.wait"] == pytest.approx(0.3)
