"""Requests that go wrong, worked out as their events come: the store says the same as when all is there at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtrace import legs
from kvtrace.analyze import analyze
from kvtrace.store import Store
from tests.field.scenes import D_LEG, P_LEG, engines_only, occupant, passed_over, renamed, repeated
from tests.field.test_attempts import answers_to_one, timed_out, two_prefills
from tests.test_analyze import fill
from tests.trace import Trace, pull


def _twice() -> Trace:
    """Return two requests under one id, without the random suffix."""
    plain = renamed(engines_only(pull()), {P_LEG: "cmpl-r1-0", D_LEG: "cmpl-r1-0"})
    second = plain.later(200)
    second.events = [e._replace(a=8) if e.stage in legs.TRANSFER_STAGES else e for e in second.events]
    return repeated(plain, second)


def _apart() -> Trace:
    """Return a pull whose legs bear different ids."""
    return renamed(pull(), {D_LEG: "cmpl-x9-0-bbbbbbbb"})


SCENES: dict[str, Callable[[], Trace]] = {
    "retry of a client": lambda: timed_out(failed=True),
    "two prefills for one decode": two_prefills,
    "several answers": lambda: answers_to_one(3),
    "one id twice": _twice,
    "ids of their own": _apart,
    "blocks of others": lambda: repeated(passed_over((36.1,)), occupant("o", 900, waits=True)),
}


def _rows(store: Store) -> list[tuple[Any, ...]]:
    rows = store.rows(
        "SELECT request_id, attempt, verdict, scope, join_method, ttft_ns, lost_ns, compute_queue_ns, coordination_ns, "
        "note FROM request ORDER BY start_ns, request_id"
    )
    return [tuple(row.values()) for row in rows]


@pytest.mark.parametrize("make", SCENES.values(), ids=list(SCENES))
def test_events_that_come_in_portions_give_the_same_rows(tmp_path: Path, make: Callable[[], Trace]) -> None:
    """Rows that stood under a leg's id, or without their partner, are replaced and not left behind."""
    whole = Trace()
    whole.events = sorted(make().events)
    with (
        Store.open(tmp_path / "parts.duckdb", "write") as parts,
        Store.open(tmp_path / "whole.duckdb", "write") as once,
    ):
        for first in range(0, len(whole.events), 13):
            portion = Trace()
            portion.events = whole.events[first : first + 13]
            fill(parts, portion)
            analyze(parts, portion.events[0].t_ns)
        fill(once, whole)
        analyze(once)

        assert _rows(parts) == _rows(once)
        assert len(_rows(once)) == len(make().answers())
