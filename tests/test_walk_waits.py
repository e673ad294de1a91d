"""How SQL divides waits: in a core's queue, in the steps that work on a request, while a transfer is prepared."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvtrace import stages
from tests.trace import MS, P, Trace, pull, push
from tests.walk_compare import compare, path_ms, path_of, stored
from tests.walk_scenes import Scene, processes

if TYPE_CHECKING:
    from pathlib import Path


def _queued(trace: Trace, side: str, for_ms: float) -> Trace:
    trace.events = [e._replace(d=round(for_ms * MS)) if e.stage == f"{side}.enqueued" else e for e in trace.events]
    return trace


@pytest.mark.parametrize(
    ("starved_ms", "turn_ms"), [(0, 13), (2, 15), (40, 18)], ids=("processor", "starved", "starved for long")
)
def test_a_wait_in_a_queue_divides_by_the_steps_meanwhile(tmp_path: Path, starved_ms: float, turn_ms: float) -> None:
    """Arrived at 2 and in the core's queue since 8; one step runs to 12, the next 18..21; taken in at 23."""
    trace = _queued(push().shifted(2.5, 20), "prefill", 15)
    trace.step(P, 90, (1, 2, 10, 11, 12)).step(P, 91, (18, 18, 20, 20, 21))
    trace.events = [
        e._replace(b=round(starved_ms * MS)) if (e.stage, e.a) == ("step.ended", 91) else e for e in trace.events
    ]

    idle = [(turn_ms, 18, "unattributed")] if turn_ms < 18 else []
    boundary = [(8, turn_ms, "prefill.step_boundary"), *idle, (18, 22, "prefill.step_boundary")]
    assert path_ms(tmp_path, trace, 2, 23) == path_of(
        [(2, 8, "prefill.frontend"), *boundary, (22, 23, "unattributed")]  # type: ignore[list-item]
    )


@pytest.mark.parametrize(
    ("in_queue_ms", "parts"),
    [
        (0.999999, [(35, 36.5, "decode.frontend")]),
        (1, [(35, 35.5, "decode.frontend"), (35.5, 36.5, "decode.step_boundary")]),
        (5, [(35, 36, "decode.step_boundary"), (36, 36.5, "unattributed")]),
    ],
    ids=("a nanosecond less", "a millisecond", "longer than all of it"),
)
def test_a_wait_in_a_queue_counts_from_a_millisecond_on(
    tmp_path: Path, in_queue_ms: float, parts: list[tuple[float, float, str]]
) -> None:
    """D's front end has the leg at 35, its scheduler at 36.5; D runs no step then."""
    trace = _queued(pull().shifted(35.9, 0.5), "decode", in_queue_ms)

    assert path_ms(tmp_path, trace, 35, 36.5) == parts


def test_chunks_of_a_prompt_are_the_steps_that_work_on_it(tmp_path: Path) -> None:
    """Two steps, 4..15 and 16..31, with the scheduler's turn between them, and the connector ahead of the second."""
    trace = push()
    trace.events = [e for e in trace.events if (e.process, e.a) != (P, 1) or e.request or "step" not in e.stage]
    trace.events = [e for e in trace.events if e.stage != "prefill.scheduled"]
    p = "cmpl-r1-0-aaaaaaaa"
    trace.step(P, 0, (4, 10, 14, 14.5, 15), tokens=300).at(4, stages.PREFILL_SCHEDULED, p, 0, 300, 0, 600)
    trace.step(P, 1, (16, 17, 30, 30.5, 31), tokens=300, connector_ms=2, before_ms=2)
    trace.at(16, stages.PREFILL_SCHEDULED, p, 1, 300, 300, 600)

    assert path_ms(tmp_path, trace, 3, 31) == [
        (3, 4, "prefill.step_boundary"), (4, 10, "prefill.launch"), (10, 14, "prefill.forward"),
        (14, 15, "prefill.sample"), (15, 16, "prefill.others"), (16, 17, "prefill.launch"),
        (17, 19, "step.connector"), (19, 30, "prefill.forward"), (30, 31, "prefill.sample"),
    ]  # fmt: skip


def test_a_handshake_takes_its_part_of_preparing(tmp_path: Path) -> None:
    """P prepares from 35 to 45.5, and shakes hands from 37 to 41, for the first millisecond with another engine."""
    trace = push().shifted(35.2, 10)
    for t_ms, stage, ref in (
        (36.5, stages.HANDSHAKE_STARTED, "d9"), (38, stages.HANDSHAKE_ENDED, "d9"),
        (38, stages.HANDSHAKE_STARTED, "d0"), (41, stages.HANDSHAKE_ENDED, "d0"),
    ):  # fmt: skip
        trace.at(t_ms, stage, process=P, ref=ref)

    assert path_ms(tmp_path, trace, 35, 45.5) == [
        (35, 36.5, "prepare"), (36.5, 41, "handshake"), (41, 45.5, "prepare")
    ]  # fmt: skip


@pytest.mark.parametrize("took_ms", [0, 0.9, 14])
def test_a_turn_that_only_the_blocks_tell_of_is_left_to_the_reference(tmp_path: Path, took_ms: float) -> None:
    """P gives blocks at 34 to a request that came at 3; of a turn that took long the look itself was not recorded."""
    trace = push().shifted(3.1, 30).at(34, stages.PREFILL_ALLOCATED, "cmpl-r1-0-aaaaaaaa", 38, 0, round(took_ms * MS))
    made = Scene(random.Random(0), 0)
    made.rows, made.events = processes(made), sorted(trace.events)
    with stored(tmp_path / "one.duckdb", [made]) as store:
        compare(store)
        row = store.rows("SELECT walked, unwalked FROM walk_request")[0]

    assert row == ({"walked": False, "unwalked": "blocks"} if took_ms > 1 else {"walked": True, "unwalked": None})
