"""What must hold of the reference walk for any trace at all, whatever is missing, doubled, shuffled or displaced."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtrace import stages
from kvtrace.model import Event
from tests.trace import JITTER_BYTES, MS, D, causes_ms, check_tiles, jittered, ns, pull, push


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(["push", "pull"]),
    noise=st.binary(min_size=JITTER_BYTES, max_size=JITTER_BYTES),
    dropped=st.sets(st.integers(0, 60), max_size=25),
    doubled=st.sets(st.integers(0, 60), max_size=10),
    lacked_ms=st.integers(-1, 30),
)
def test_segments_tile_and_shares_sum_whatever_happens(
    mode: str, noise: bytes, dropped: set[int], doubled: set[int], lacked_ms: int
) -> None:
    """Missing, doubled, shuffled, displaced events, no processor, copies: segments tile, shares sum, bounds hold."""
    trace = push() if mode == "push" else pull()
    events = jittered(trace.events, noise)
    trace.events = [event for index, event in enumerate(events) if index not in dropped]
    trace.events += [event for index, event in enumerate(events) if index in doubled]
    check_tiles(trace)
    trace.events += [told for event in trace.events for told in _without_processor(event, lacked_ms * MS)]
    check_tiles(trace)
    trace.events += [copied for event in trace.events for copied in _copied(event, lacked_ms * MS)]
    check_tiles(trace)


def _without_processor(event: Event, ns: int) -> Iterator[Event]:
    """Yield what is said where the thread behind the event had no processor for so long, ns."""
    told = {
        "step.connected": (stages.WORKER_STARVED, event.a, 0, ns, ns),
        "step.ended": (stages.RESULT_STARVED, event.a, 0, ns, 0),
        "transfer.post_ended": (stages.POST_STARVED, event.a, ns, 0, 0),
        "transfer.done": (stages.NOTICE_STARVED, 0, ns, 2 * ns, 0),
        "transfer.notified": (stages.NOTICE_STARVED, 0, ns, ns, 0),
    }.get(event.stage)  # fmt: skip
    if told is not None:
        stage, *numbers = told
        yield Event(event.t_ns, stage.name, event.process, event.request, "", *numbers)


def _copied(event: Event, ns: int) -> Iterator[Event]:
    """Yield begin and end of a copy that took so long, ns, and was over at the event."""
    begin, end, request = {
        "step.connected": (stages.PREFILL_COPY_STARTED, stages.PREFILL_COPIED, "cmpl-r1-0-aaaaaaaa"),
        "decode.reported": (stages.DECODE_COPY_STARTED, stages.DECODE_COPIED, event.request),
    }.get(event.stage, (None, None, ""))
    if begin is not None and end is not None:
        yield Event(event.t_ns - ns, begin.name, event.process, request, "", 0, 38, 0, 0)
        yield Event(event.t_ns, end.name, event.process, request, "", 0, 38, 0, 0)


def test_a_step_that_ended_before_it_was_made_up_takes_no_time_from_others() -> None:
    """As where an end was recorded, and later another step of that number: D waits from 45 to 76 for its own step."""
    trace = push().shifted(45.5, 30).step(D, 77, (60, 60.5, 61, 61.5, 55), tokens=500)
    check_tiles(trace)

    assert causes_ms(trace.answer()) == causes_ms(push().shifted(45.5, 30).answer())


def test_what_was_posted_before_the_request_began_is_no_part_of_it() -> None:
    """Two clocks: the post is stamped 40 ms before the start, the completion at 33; the pair's fastest took 1 ms."""
    stamped = {"transfer.post_started": ns(-40), "transfer.done": ns(33)}
    trace = pull()
    trace.events = [event._replace(t_ns=stamped.get(event.stage, event.t_ns)) for event in trace.events]
    trace.events += pull("r2").later(1_000).events
    check_tiles(trace)

    assert trace.answers()[0].transfer_high_ns == 33 * MS


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), shift_ms=st.integers(-(10**6), 10**6))
def test_order_and_a_common_shift_change_nothing(seed: int, shift_ms: int) -> None:
    """Events in any order, and all clocks moved together, give the same shares and causes."""
    plain = push().answer()
    trace = push()
    random.Random(seed).shuffle(trace.events)
    trace.events = [event._replace(t_ns=event.t_ns + shift_ms * MS) for event in trace.events]

    assert causes_ms(trace.answer()) == causes_ms(plain)


@settings(max_examples=60, deadline=None)
@given(longer_ms=st.floats(0, 60))
def test_hidden_work_may_grow_by_its_slack_and_no_more(longer_ms: float) -> None:
    """Sent at 4, needed at 35: within that slack TTFT stays, beyond it TTFT grows by the excess."""
    answer = push(4 + longer_ms).answer()

    assert answer.ttft_ns == pytest.approx(60 * MS + max(0.0, longer_ms - 30) * MS, abs=2)
