"""Requests that go wrong, worked out as their events come: the store says the same as when all is there at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtrace import keeping, legs, stages
from kvtrace.analyze import analyze
from kvtrace.store import Store
from tests.field.published import read
from tests.field.scenes import D_LEG, P_LEG, carrying, changed, engines_only, occupant, passed_over, renamed, repeated
from tests.field.test_attempts import answers_to_one, timed_out, two_prefills
from tests.field.test_waiting import behind
from tests.test_analyze import fill
from tests.trace import Trace, pull, push


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
    "ids of their own, one transfer": lambda: renamed(
        carrying(changed(push(), stages.DECODE_ENQUEUED, ref="").without("transfer.matched"), "t", "t"),
        {D_LEG: "cmpl-x9-0-bbbbbbbb"},
    ),
    "posts of others": lambda: behind("cmpl-o-0-cccccccc"),
    "posts in steps of others": lambda: read(6.7, 38.7, on_forward_thread=True),
    "a pair's fastest": lambda: repeated(_unseen("r1"), push(name="r2").later(20, 50), _unseen("r3").later(200, 100)),
    "a pair's quickest message": lambda: repeated(push(24), push(40, "r2").later(200)),
    "blocks of others": lambda: repeated(passed_over((36.1,)), occupant("o", 900, waits=True)),
}


def _rows(store: Store) -> list[tuple[Any, ...]]:
    rows = store.rows(
        "SELECT request_id, attempt, verdict, scope, join_method, ttft_ns, lost_ns, compute_queue_ns, coordination_ns, "
        "note FROM request ORDER BY start_ns, request_id"
    )
    return [tuple(row.values()) for row in rows]


_PARTS_SQL = (
    "SELECT r.request_id, s.cause, s.waited_for, s.start_ns, s.end_ns FROM segment AS s JOIN request AS r "
    "USING (request_key) ORDER BY ALL",
    "SELECT r.request_id, p.* EXCLUDE (request_key) FROM pace AS p JOIN request AS r USING (request_key) ORDER BY ALL",
    "SELECT r.request_id, p.cause, p.duration_ns FROM pace_part AS p JOIN request AS r USING (request_key) "
    "ORDER BY ALL",
    "SELECT r.request_id, b.blamed_request_id, b.extension_ns FROM blame AS b JOIN request AS r USING (request_key) "
    "ORDER BY ALL",
    "SELECT r.request_id, h.* EXCLUDE (request_key) FROM hidden AS h JOIN request AS r USING (request_key) "
    "ORDER BY ALL",
)


def _unseen(name: str) -> Trace:
    """Return a push of which only D's notification says when the write was over, 20 ms later than in `push`."""
    return push(name=name).without("transfer.done").shifted(41.5, 20)


@pytest.mark.parametrize("make", SCENES.values(), ids=list(SCENES))
def test_events_that_come_in_portions_give_the_same_rows(
    tmp_path: Path, make: Callable[[], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that stood under a leg's id, or without their partner, are replaced and not left behind."""
    monkeypatch.setattr(keeping, "refresh", lambda *_: None)  # answers take nothing from what is kept beside them
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
        for sql in _PARTS_SQL:
            assert parts.rows(sql) == once.rows(sql)
        assert len(_rows(once)) == len(make().answers())
