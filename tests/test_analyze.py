"""Stored events become stored answers, and working out a part again changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from kvtrace import keeping, stages
from kvtrace.analyze import analyze, load_processes, worked_out
from kvtrace.legs import BEFORE_ID, base_ids
from kvtrace.model import Event
from kvtrace.store import Store
from tests.field.scenes import D_LEG, P_LEG, STAND_IN, carrying, changed, renamed
from tests.test_schema import append_process
from tests.trace import D_API, MS, P_API, ROUTER, START_NS, D, P, Trace, pull, push

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FACTS = {
    ROUTER: {"kind": "router"},
    P: {"kind": "core", "engine_id": "engine-p"},
    D: {"kind": "core", "engine_id": "engine-d"},
    P_API: {"kind": "api"},
    D_API: {"kind": "api"},
}
_PARENTS = {P: P_API, D: D_API}


def fill(store: Store, trace: Trace) -> None:
    """Append a trace's events, and the processes of `tests.trace` if they are not there yet."""
    if not store.rows("SELECT 1 FROM process"):
        store.append(
            "process", pa.Table.from_pylist([process_row(p) for p in _FACTS], schema=store.arrow_schema("process"))
        )
    rows = [dict(zip(Event._fields, event, strict=True)) for event in trace.events]
    store.append("event", pa.Table.from_pylist(rows))


def process_row(process: int) -> dict[str, Any]:
    return {
        "process": process, "series": f"s{process}", "host": "host-a", "domain": "boot-1", "pid": process,
        "parent_pid": _PARENTS.get(process, 0), "offset_ns": 0, "lost_records": 0,
        "facts": list(_FACTS[process].items()),
    }  # fmt: skip


def test_a_schedulers_limits_come_from_its_facts(tmp_path: Path) -> None:
    """What is no number, and what is not said, is no limit."""
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        append_process(store, 1, kind="core", engine_id="p", max_num_batched_tokens="2048", max_num_seqs="16")
        append_process(store, 2, kind="core", engine_id="d", max_num_batched_tokens="many")
        found = load_processes(store)

    assert [(found[number].max_tokens, found[number].max_requests) for number in (1, 2)] == [(2048, 16), (0, 0)]


def _answers(store: Store) -> list[dict[str, Any]]:
    rows = store.rows(
        "SELECT request.* EXCLUDE (request_key), list(segment ORDER BY position) AS segments FROM request "
        "LEFT JOIN (SELECT request_key, position, cause, start_ns, end_ns FROM segment) AS segment USING (request_key) "
        "GROUP BY ALL ORDER BY request_id"
    )
    return [{**row, "segments": [tuple(s.values())[1:] for s in row["segments"]]} for row in rows]


def test_answers_reach_the_tables(tmp_path: Path) -> None:
    """One push and one pull hand-off of 60 ms each: rows, shares and segments that add up."""
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, push(name="a"))
        fill(store, pull("b").later(1_000))

        assert analyze(store) == 2

        rows = store.rows("SELECT * FROM request ORDER BY request_id")
        assert [(row["request_id"], row["mode"], row["verdict"], row["ttft_ns"]) for row in rows] == [
            ("a", "push", "complete", 60 * MS),
            ("b", "pull", "complete", 60 * MS),
        ]
        assert all(
            row["compute_ns"] + row["coordination_ns"] + row["transfer_ns"] + row["unattributed_ns"] == row["ttft_ns"]
            for row in rows
        )
        summed = store.rows("SELECT request_key, sum(end_ns - start_ns)::BIGINT AS ns FROM segment GROUP BY ALL")
        assert [row["ns"] for row in summed] == [60 * MS, 60 * MS]
        engines = store.rows("SELECT DISTINCT prefill_engine, decode_engine FROM request")
        assert engines == [{"prefill_engine": "engine-p", "decode_engine": "engine-d"}]


def test_a_part_worked_out_again_equals_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that come in portions, each analysed as it comes, give what all of them give at once.

    The three take the same time on the wire: how fast a pair can be is learnt from what has been seen by then.
    """
    monkeypatch.setattr(keeping, "refresh", lambda *_: None)  # answers take nothing from what is kept beside them
    whole = [*push(name="a").events, *push(name="b").later(40).events, *push(name="c").later(90, 300).events]
    whole.sort()
    with (
        Store.open(tmp_path / "parts.duckdb", "write") as parts,
        Store.open(tmp_path / "whole.duckdb", "write") as once,
    ):
        for first in range(0, len(whole), 17):
            portion = Trace()
            portion.events = whole[first : first + 17]
            fill(parts, portion)
            analyze(parts, portion.events[0].t_ns)
        everything = Trace()
        everything.events = whole
        fill(once, everything)
        analyze(once)

        assert _answers(parts) == _answers(once)


def test_what_comes_while_a_part_is_worked_out_is_in_the_next(tmp_path: Path) -> None:
    """Portions that come between two parts of an analysis, each analysed behind it, give what all give at once."""
    whole = [*push(name="a").events, *push(name="b").later(40).events, *push(name="c").later(90, 300).events]
    whole.sort()
    portions = [Trace() for _ in range(0, len(whole), 7)]
    for number, portion in enumerate(portions):
        portion.events = whole[7 * number : 7 * number + 7]
    with (
        Store.open(tmp_path / "parts.duckdb", "write") as parts,
        Store.open(tmp_path / "whole.duckdb", "write") as once,
    ):
        arriving = iter(portions)
        fill(parts, next(arriving))
        since_ns: list[int] = [portions[0].events[0].t_ns]
        while since_ns:
            coming: list[int] = []

            def meanwhile(coming: list[int] = coming) -> None:
                if (portion := next(arriving, None)) is not None:
                    fill(parts, portion)
                    coming.append(portion.events[0].t_ns)

            write = worked_out(parts, min(since_ns), meanwhile)
            with parts.transaction():
                write()
            since_ns = coming
        everything = Trace()
        everything.events = whole
        fill(once, everything)
        analyze(once)

        assert _answers(parts) == _answers(once)
        for table in ("step", "leg", "transfer", "notable", "occurrence"):
            assert parts.select(f"FROM {table} ORDER BY ALL").values == once.select(f"FROM {table} ORDER BY ALL").values


@pytest.mark.parametrize(
    ("late", "leg"), [(stages.PREFILL_RELEASED, P_LEG), (stages.DECODE_FINISHED, "other-0-bbbbbbbb")]
)
def test_legs_that_only_a_transfer_id_joins_stay_joined_when_one_goes_on(
    tmp_path: Path, late: stages.Stage, leg: str
) -> None:
    """The last event of either leg comes by itself, when nothing new is told of the other."""
    apart = changed(carrying(push(), "t", "t"), stages.DECODE_ENQUEUED, ref="").without("transfer.matched", late.name)
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        for portion in (renamed(apart, {D_LEG: "other-0-bbbbbbbb"}), Trace().at(900, late, leg)):
            fill(store, portion)
            analyze(store, min(event.t_ns for event in portion.events))
        in_parts = _answers(store)
        analyze(store)

        assert [(row["join_method"], row["mode"]) for row in in_parts] == [("transfer_id", "push")]
        assert in_parts == _answers(store)


def test_what_stands_for_a_refused_request_in_d_joins_it_whichever_comes_first(tmp_path: Path) -> None:
    """D's core is read before the router's spool: its leg has a row of its own until the router's events are there."""
    stand_in = Trace().at(35, stages.DECODE_ENQUEUED, STAND_IN, 1, 0, 1, ref="cmpl-a-0")
    stand_in.at(35.1, stages.DECODE_ABORTED, STAND_IN)
    front = Trace().at(36, stages.ROUTER_RECEIVED, "a").at(37, stages.ROUTER_FAILED, "a", 404, ref="decode: 404")
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        for portion in (stand_in, front):
            fill(store, portion)
            analyze(store, min(event.t_ns for event in portion.events))

        told = [(row["request_id"], row["verdict"], row["decode_engine"]) for row in store.rows("FROM request")]
        assert told == [("a", "failed", "engine-d")]


@pytest.mark.parametrize("hand_off", [push, pull])
def test_a_request_of_a_quarter_of_an_hour_keeps_its_answer(tmp_path: Path, hand_off: Callable[..., Trace]) -> None:
    """Its end comes when its beginning is not looked for any more; another request goes on meanwhile."""
    long, other = hand_off(name="long").shifted(80, 900_000), hand_off(name="other").later(450_000)
    stages, ends = {event.stage for event in long.events}, ("decode.finished", "router.done")
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        for portion in (long.without(*ends), other, *(long.without(*stages - {end}) for end in ends)):
            fill(store, portion)
            analyze(store, min(event.t_ns for event in portion.events))

        told = [(row["request_id"], row["verdict"], row["ttft_ns"]) for row in store.rows("FROM request ORDER BY ALL")]
        assert told == [("long", "complete", 60 * MS), ("other", "complete", 60 * MS)]


def test_an_id_that_comes_again_later_leaves_the_earlier_answer(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        for portion in (push(name="a"), push(name="a").later(1_200_000)):
            fill(store, portion)
            for end in (20, len(portion.events)):
                analyze(store, min(event.t_ns for event in portion.events[end - 20 : end]))

        told = store.rows("SELECT start_ns, request_id, verdict, ttft_ns FROM request ORDER BY start_ns")
        assert [row["start_ns"] - START_NS for row in told] == [0, 1_200_000 * MS]
        assert {(row["request_id"], row["verdict"], row["ttft_ns"]) for row in told} == {("a", "complete", 60 * MS)}


def test_what_is_left_of_an_engines_id_begins_with_each_id_that_a_front_end_may_have_sent(tmp_path: Path) -> None:
    """Else a part that is worked out again would miss events of its requests."""
    befores = ("", "cmpl-", "chatcmpl-", "3_cmpl-", "12_resp-", "3_", "12_3_cmpl-", "cmpl-cmpl-", "\u0663_cmpl-")
    names = [
        before + name for before in befores for name in ("", "a", "a-0", "a-0-0123abcd", "a-0123abcd", "a-0-0123abcd\n")
    ]
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        sql = f"SELECT name, regexp_replace(name, '{BEFORE_ID}', '') FROM (SELECT unnest($names) AS name)"  # noqa: S608 -- a constant
        left = dict(store.select(sql, {"names": names}).values)

    assert set(left) == set(names)
    assert [(name, base) for name in names for base in base_ids(name) if not left[name].startswith(base)] == []


def test_an_empty_store_has_no_answers(tmp_path: Path) -> None:
    """Nothing recorded, nothing said."""
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        assert analyze(store) == 0
        assert analyze(store, START_NS) == 0
        assert store.rows("SELECT * FROM request") == []
