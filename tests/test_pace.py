"""The pace of the tokens after the first, on steps that a reader can add up, and what must hold for any steps."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace import model, stages
from kvtrace.evidence import Posts
from kvtrace.model import Event
from tests.field.scenes import D1, changed, ranks
from tests.trace import MS, D, Trace, ns, pull, push

REQUEST = "cmpl-r1-0-bbbbbbbb"


def paced(trace: Trace) -> dict[str, model.Pace]:
    """Return the pace of every request of a trace by its id."""
    return {answer.request.request_id: answer.pace for answer in trace.answers() if answer.pace is not None}


def parts_ms(one: model.Pace) -> dict[str, float]:
    return {cause: spent_ns / MS for cause, spent_ns in one.parts_ns.items()}


def decoding(trace: Trace, count: int = 4, *, first_ms: float = 54.0, tokens: int = 1, **step: float) -> Trace:
    """Add steps of 9 ms to D: made 0.5 after the one before, begun 1, forward until 7, connected 8, taken in 9."""
    for number in range(count):
        at = first_ms + 9 * number
        times = (at + 0.5, at + 1, at + 7, at + 8, at + 9)
        trace.step(D, 10 + number, times, tokens=tokens, **step)  # type: ignore[arg-type]
    return trace


def test_a_plain_pace_adds_up() -> None:
    """Sampled at 54, then four steps of 9 ms: five tokens, the last at 90."""
    one = paced(decoding(push()))["r1"]

    assert (one.tokens, one.tpot_ns) == (4, 9 * MS)
    assert one.itl_ns == [9 * MS] * 4
    assert parts_ms(one) == {"decode.turn": 2, "decode.launch": 2, "decode.token": 24, "decode.sample": 8}
    assert (one.start_ns, one.end_ns, one.extension_ns, one.blame_ns) == (ns(54), ns(90), 0, {})


def test_connector_work_before_the_forward_extends_the_step() -> None:
    """2 ms before each forward and 1 ms behind it are 3 ms more a token."""
    one = paced(decoding(push(), connector_ms=3, before_ms=2))["r1"]

    assert (one.extension_ns, one.occupancy_ns) == (12 * MS, 12 * MS)
    assert parts_ms(one)["step.connector"] == 12
    assert parts_ms(one)["decode.token"] == 16


def test_a_step_without_a_processor_makes_no_token() -> None:
    """Of each forward of 6 ms the worker's thread had none for 4, and of the time to take in for a quarter of 1."""
    trace = decoding(push())
    for number in range(4):
        trace.at(62.0 + 9 * number, stages.WORKER_STARVED, "", 10 + number, 0, 4 * MS, 0, process=D)
        trace.at(63.0 + 9 * number, stages.RESULT_STARVED, "", 10 + number, 0, MS // 4, process=D)
    one = paced(trace)["r1"]

    assert one.itl_ns == [9 * MS] * 4
    assert parts_ms(one) == {
        "decode.turn": 2, "decode.launch": 2, "decode.token": 8, "decode.sample": 7, "processor.wait": 17
    }  # fmt: skip


def test_work_beside_an_asynchronous_forward_extends_nothing() -> None:
    """The connector worked for 3 ms while the device still computed: it took time there and cost none."""
    trace = push()
    for number in range(4):
        at = 54.0 + 9 * number
        trace.step(D, 10 + number, (at + 0.5, at + 1, at + 8, at + 5, at + 9), connector_ms=3)
    one = paced(trace)["r1"]

    assert (one.extension_ns, one.occupancy_ns) == (0, 12 * MS)


def test_the_one_whose_transfer_was_posted_is_blamed() -> None:
    """r2's read is posted at 59..61, inside r1's step 10, whose connector works from 55 to 62 before the forward."""
    trace = push().step(D, 10, (54.5, 55, 70, 70, 71), requests=1, connector_ms=7, before_ms=7)
    trace.events = [
        event._replace(t_ns=ns(70.5)) if event.stage == "decode.finished" else event for event in trace.events
    ]
    other = pull("r2").shifted(-1e9, 20)
    trace.events += [
        event for event in other.events
        if not event.stage.startswith("step.") and event.stage not in ("decode.scheduled", "prefill.scheduled")
    ]  # fmt: skip
    one = paced(trace)["r1"]

    # posted 39..40 in its own trace, 20 later here
    assert one.blame_ns == {"r2": 1 * MS}
    assert one.extension_ns == 7 * MS


def _posted_by_two_ranks(slowest: int) -> model.Pace:
    """Return the pace of r1, in whose step 10 both ranks post r2's read at 56..61: 7 ms in one, 6 ms in the other."""
    trace = push().step(D, 10, (54.5, 55, 70, 70, 71), connector_ms=7, before_ms=7)
    trace.at(69, stages.STEP_CONNECTED, "", 10, 1, 6 * MS, 6 * MS, process=D1)
    trace = changed(trace, stages.DECODE_FINISHED, t_ns=ns(70.5))
    if slowest == D1:
        trace = changed(trace, stages.STEP_CONNECTED, lambda e: e.process == D1, c=8 * MS, d=8 * MS)
    read = "cmpl-r2-0-bbbbbbbb"
    for process in (D, D1):
        trace.at(55.5, stages.PREPARED, read, 8, 20, 0, process=process)
        trace.at(56, stages.POST_STARTED, read, 8, process=process)
        trace.at(61, stages.POST_ENDED, read, 8, 1_000, 20, process=process)
    return next(a.pace for a in trace.answers(ranks(1, 2)) if a.pace is not None)


def test_ranks_that_post_at_the_same_time_extend_a_step_once() -> None:
    """The step waits for the slowest rank: what was posted in it is a part of the extension, and never more."""
    first, second = _posted_by_two_ranks(D), _posted_by_two_ranks(D1)

    assert (first.extension_ns, first.blame_ns) == (7 * MS, {"r2": 5 * MS})
    assert (second.extension_ns, second.blame_ns) == (8 * MS, {"r2": 5 * MS})


def test_a_long_post_is_found_behind_short_ones() -> None:
    """Posts of 34..72, 35..36 and 36..37 by three threads: at 50 the first is under way, though it stands first."""
    spans = [model.Posted(34, 72, "long", D), model.Posted(35, 36, "a", D), model.Posted(36, 37, "b", D)]

    assert list(Posts(spans).during(50, 60)) == [model.Posted(50, 60, "long", D)]
    assert list(Posts(spans).during(35, 40)) == [model.Posted(35, 40, "long", D)]
    assert list(Posts(spans).during(72, 80)) == []


@pytest.mark.parametrize("end", [10, 4_000_000], ids=["beside short ones", "beside a long one"])
def test_posts_are_looked_up_as_quickly_among_many_as_among_few(end: int) -> None:
    """A thousand times as many posts come later, also while a long one is under way."""
    best_s = []
    for count in (200, 200_000):
        short = (model.Posted(10 * number + 1, 10 * number + 5, "r", D) for number in range(count))
        posts = Posts([model.Posted(0, end, "first", D), *short])
        best_s.append(min(timeit.repeat(lambda posts=posts: list(posts.during(2, 8)), number=20, repeat=10)))  # type: ignore[misc]
        assert len(list(posts.during(2, 8))) == 1

    assert best_s[1] < 20 * best_s[0]


def test_a_step_that_prefills_for_others_is_told_apart() -> None:
    """Steps of 8 tokens for 2 requests hold somebody's prompt."""
    one = paced(decoding(push(), tokens=8, requests=2))["r1"]

    assert parts_ms(one)["decode.mixed"] == 24
    assert "decode.token" not in parts_ms(one)


def test_preempted_steps_are_others() -> None:
    """Preempted at 60 and scheduled again at 72.5: the step from 63.5 on works on others, and yields no token."""
    trace = decoding(push()).at(60, stages.DECODE_PREEMPTED, REQUEST)
    trace.at(72.5, stages.DECODE_SCHEDULED, REQUEST, 12, 602, 0, 602)
    one = paced(trace)["r1"]

    assert one.itl_ns == [9 * MS, 18 * MS, 9 * MS]
    assert parts_ms(one)["decode.others"] == 8.5


def test_a_pause_without_a_step_is_nobodys() -> None:
    """D's core stood still for 40 ms before its third step: at most the scheduler's own turn is known."""
    trace = decoding(push(), 2)
    late = decoding(Trace(), 2, first_ms=112.0)
    trace.events += [e._replace(a=e.a + 2) if e.stage.startswith("step.") else e for e in late.events]
    trace.events = [e._replace(t_ns=ns(129.5)) if e.stage == "decode.finished" else e for e in trace.events]
    one = paced(trace)["r1"]

    assert parts_ms(one)["unattributed"] == 39.5
    assert max(one.itl_ns) == 49 * MS


@pytest.mark.parametrize("missing", ["decode.finished", "step.ended", "decode.scheduled"])
def test_without_the_ends_there_is_no_pace(missing: str) -> None:
    """A pace whose first or last token was not seen is not guessed."""
    trace = decoding(push()).without(missing)

    assert paced(trace) == {}


def test_one_token_has_no_pace_to_tell() -> None:
    """A request of one token ends with its first: nothing follows, and there is no time per token."""
    trace = decoding(push())
    trace.events = [e._replace(a=1, t_ns=ns(53.9)) if e.stage == "decode.finished" else e for e in trace.events]
    one = paced(trace)["r1"]

    assert (one.tpot_ns, one.itl_ns, one.parts_ns) == (None, [], {})


def test_a_step_that_is_seen_to_end_before_the_one_before_it_takes_no_time() -> None:
    """Steps end at 55, 54.5 and 56: 2 ms from the first token on, and no part is below 0."""
    trace = push().step(D, 11, (54.1, 54.2, 54.3, 54.3, 55)).step(D, 12, (54.4, 54.4, 54.4, 54.4, 54.5))
    trace.step(D, 13, (55.1, 55.2, 55.8, 55.8, 56))
    one = paced(changed(trace, stages.DECODE_FINISHED, t_ns=ns(56)))["r1"]

    assert sum(one.parts_ns.values()) == one.end_ns - one.start_ns == 2 * MS
    assert min(one.parts_ns.values()) > 0


@given(st.data())
def test_the_parts_tile_and_the_gaps_sum(data: st.DataObject) -> None:
    """Whatever the order of a step's points, the parts and the times between tokens sum to last minus first token."""
    trace = push()
    at = 54.0
    for number in range(data.draw(st.integers(0, 6))):
        times = sorted(data.draw(st.lists(st.floats(0, 12), min_size=3, max_size=3)))
        forwarded = data.draw(st.sampled_from([0.0, at + times[1], at + times[2] + 3]))
        connected = at + data.draw(st.floats(0, 15))
        trace.step(
            D, 10 + number, (at + times[0], at + times[1], forwarded, connected, at + times[2] + 0.1),
            tokens=data.draw(st.sampled_from([1, 9])), connector_ms=data.draw(st.floats(0, 9)),
        )  # fmt: skip
        at += times[2]
    trace.events = [e._replace(t_ns=ns(at)) if e.stage == "decode.finished" else e for e in trace.events]
    if data.draw(st.booleans()):
        trace.events.append(Event(ns(60), "decode.preempted", D, REQUEST, "", 0, 0, 0, 0))
    one = paced(trace)["r1"]

    assert sum(one.parts_ns.values()) == one.end_ns - one.start_ns
    assert all(spent_ns >= 0 for spent_ns in one.parts_ns.values())
    assert sum(one.itl_ns) <= one.end_ns - one.start_ns
    assert one.extension_ns >= 0
