"""The schema: what is documented is what DuckDB has, and everything derives from the vocabulary."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from kvtrace import keeping, schema, stages
from kvtrace.errors import QueryError
from kvtrace.store import Store
from tests.golden_files import check_golden

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MS = 1_000_000
PARTS = [*schema.TABLES, *schema.VIEWS]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "run.duckdb", "write") as opened:
        yield opened


def append_events(store: Store, *rows: tuple[object, ...]) -> None:
    """Append (process, stage, t_ms, request, ref, a, b, c, d) rows."""
    names = ("process", "stage", "t_ns", "request", "ref", "a", "b", "c", "d")
    values = [dict(zip(names, (row[0], row[1], row[2] * MS, *row[3:]), strict=True)) for row in rows]
    store.append("event", pa.Table.from_pylist(values))
    keeping.refresh(store)


def append_process(
    store: Store, process: int, *, pid: int = 0, parent: int = 0, started_ns: int = 0, **facts: str
) -> None:
    store.append(
        "process",
        pa.table(
            {
                "process": [process],
                "series": [f"s{process}"],
                "host": ["h"],
                "domain": ["d"],
                "pid": [pid],
                "parent_pid": [parent],
                "started_ns": [started_ns],
                "offset_ns": [1000 * MS],
                "lost_records": [0],
                "facts": pa.array([sorted(facts.items())], pa.map_(pa.string(), pa.string())),
            }
        ),
    )


def test_the_ddl_is_as_reviewed() -> None:
    """Every change of the schema shows as a diff, beside which SCHEMA_VERSION is to be thought of."""
    check_golden("schema.sql", _LONG_TEXT.sub(_digest, schema.ddl()))


_LONG_TEXT = re.compile(r"'(?:[^']|''){5000,}'")


def _digest(text: re.Match[str]) -> str:
    """Return what stands for the SQL of the walk, which is generated, and proved in tests/test_walk.py."""
    return f"'{len(text[0])} letters, sha256 {hashlib.sha256(text[0].encode()).hexdigest()}'"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_documented_columns_are_the_real_ones(blank: Store, part: schema.Table | schema.View) -> None:
    real = blank.rows(f"DESCRIBE {part.name}")

    assert [(c.name, c.sql_type) for c in part.columns] == [
        (row["column_name"], "stage" if row["column_type"].startswith("ENUM") else row["column_type"]) for row in real
    ]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_column_carries_its_comment_in_the_file(blank: Store, part: schema.Table | schema.View) -> None:
    found = blank.rows(
        "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = $name ORDER BY column_index",
        {"name": part.name},
    )

    assert [(c.name, c.doc) for c in part.columns] == [(row["column_name"], row["comment"]) for row in found]


def test_every_macro_carries_a_comment_in_the_file(blank: Store) -> None:
    found = blank.rows("SELECT function_name, comment FROM duckdb_functions() WHERE NOT internal ORDER BY 1")

    assert [row["function_name"] for row in found] == ["walk_common_sql", "walk_request_sql", "walk_segment_sql"]
    assert all(row["comment"] for row in found)


def test_no_column_is_wider_than_grafana_reads(blank: Store) -> None:
    """HUGEINT arrives there as text, and NULL in an unsigned column not at all."""
    types = {row["data_type"] for row in blank.rows("SELECT data_type FROM duckdb_columns() WHERE NOT internal")}

    assert types <= {
        "VARCHAR", "VARCHAR[]", "INTEGER", "BIGINT", "BIGINT[]", "DOUBLE", "BOOLEAN", "TIMESTAMP WITH TIME ZONE",
        "MAP(VARCHAR, VARCHAR)", "MAP(VARCHAR, BIGINT)", *(t for t in types if t.startswith("ENUM")),
    }  # fmt: skip


def test_the_stage_type_is_the_vocabulary(blank: Store) -> None:
    rows = blank.rows("SELECT stage, code FROM vocabulary ORDER BY code")

    assert {row["stage"]: row["code"] for row in rows} == {stage.name: stage.code for stage in stages.STAGES}
    assert {row["cause"] for row in blank.rows("SELECT cause FROM cause")} == {cause.name for cause in stages.CAUSES}


def test_a_stage_that_is_not_declared_is_refused(store: Store) -> None:
    with pytest.raises(QueryError):
        append_events(store, (1, "no.such", 1, "", "", 0, 0, 0, 0))


def test_events_carry_their_payload_under_its_names(store: Store) -> None:
    append_process(store, 1, kind="core", engine_id="P")
    append_events(
        store, (1, "step.scheduled", 5, "", "", 7, 100, 3, 2), (1, "tracing.disabled", 6, "", "why", 0, 0, 0, 0)
    )

    rows = store.rows("SELECT kind, engine, payload, ref FROM event_named ORDER BY t_ns")

    assert rows == [
        {"kind": "core", "engine": "P", "payload": {"step": 7, "tokens": 100, "requests": 3, "waiting": 2}, "ref": ""},
        {"kind": "core", "engine": "P", "payload": {}, "ref": "why"},
    ]


def test_a_step_joins_its_scheduler_and_all_its_workers(store: Store) -> None:
    """It ends with the slowest rank, whose times count; a step of the same number in another engine stays apart.

    A rank is through at 10 and told to sample at 11: until then it lacked no processor that it had a use for.
    """
    append_process(store, 1, pid=10, kind="core", engine_id="P")
    append_process(store, 2, pid=11, parent=10, started_ns=1, kind="worker", engine_id="P", rank="0")
    append_process(store, 3, pid=12, parent=10, started_ns=1, kind="worker", engine_id="P", rank="1")
    append_process(store, 4, pid=20, kind="core", engine_id="D")
    append_events(
        store,
        (1, "step.scheduled", 1, "", "", 5, 64, 2, 0),
        (2, "step.started", 2, "", "", 5, 0, 0, 0),
        (3, "step.started", 3, "", "", 5, 1, 0, 0),
        (2, "step.forwarded", 8, "", "", 5, 0, 0, 0),
        (3, "step.forwarded", 9, "", "", 5, 1, 0, 0),
        (2, "step.connected", 10, "", "", 5, 0, 400, 300),
        (3, "step.connected", 11, "", "", 5, 1, 700, 100),
        (2, "step.worker_starved", 10, "", "", 5, 0, 600, 50),
        (3, "step.worker_starved", 11, "", "", 5, 1, 300, 80),
        (2, "step.result_starved", 12, "", "", 5, 0, MS + 40, 0),
        (1, "step.ended", 12, "", "", 5, 900, MS, 0),
        (4, "step.scheduled", 1, "", "", 5, 1, 1, 0),
    )

    rows = store.rows("SELECT * EXCLUDE (ts, waiting, gap_ns) FROM step ORDER BY process")

    assert len(rows) == 2
    assert rows[0] == {
        "process": 1, "step": 5, "engine": "P", "scheduled_ns": 1 * MS, "started_ns": 2 * MS, "forwarded_ns": 9 * MS,
        "connected_ns": 11 * MS, "ended_ns": 12 * MS, "tokens": 64, "requests": 2, "ranks": 2, "connector_ns": 700,
        "before_forward_ns": 100, "starved_ns": 900, "forward_starved_ns": 600, "connector_starved_ns": 80,
        "result_starved_ns": 40,
    }  # fmt: skip


def test_a_transfer_shows_both_ends_of_its_bracket_and_its_notification(store: Store) -> None:
    """The last pending poll is stamped on the monotonic clock and shown, like everything, as unix ns."""
    append_process(store, 1, kind="core", engine_id="P")
    append_process(store, 2, kind="core", engine_id="D")
    append_events(
        store,
        (2, "transfer.notified", 1, "d-1", "", 0, 0, 0, 0),  # an earlier life of that id
        (1, "transfer.prepared", 3, "p-1", "d-1", 9, 4, 0, 0),
        (1, "transfer.post_started", 4, "p-1", "", 9, 0, 0, 0),
        (1, "transfer.post_ended", 5, "p-1", "", 9, 4096, 4, 0),
        (1, "transfer.done", 9, "p-1", "", 9, -993 * MS, 3, 0),
        (2, "transfer.notified", 8, "d-1", "", 0, 0, 0, 0),
    )

    row = store.rows("SELECT * FROM transfer")[0]

    assert (row["engine"], row["request"], row["remote_request"], row["moved_bytes"], row["descriptors"]) == (
        "P", "p-1", "d-1", 4096, 4,
    )  # fmt: skip
    names = ("post_started_ns", "post_ended_ns", "last_pending_ns", "done_ns", "notified_ns")
    assert [row[name] // MS for name in names] == [4, 5, 7, 9, 8]
    assert row["polls"] == 3
    assert row["failed_ns"] is None


def test_an_api_server_belongs_to_the_engine_that_it_started(store: Store) -> None:
    append_process(store, 1, pid=10, kind="api")
    append_process(store, 2, pid=11, parent=10, started_ns=5, kind="core", engine_id="P")

    assert store.rows("SELECT process, core, engine FROM engine_process ORDER BY process") == [
        {"process": 1, "core": 1, "engine": "P"},
        {"process": 2, "core": 2, "engine": "P"},
    ]
