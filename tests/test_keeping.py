"""The tables kept beside the events: in part or at once they are the same, and what is counted is what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from kvtrace import keeping, queries
from kvtrace.analyze import analyze
from kvtrace.schema.keeping import COARSE_NS, FINE_NS
from kvtrace.store import Store
from kvtrace.testing import Fleet, batches, processes
from tests.sample_store import MS, PUSH_HIDDEN, START_NS, Sample
from tests.test_schema import append_events, append_process

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Fleet(250, seed=7, per_s=40.0, odd_share=0.2, pairs=2)
KEPT = ("step", "leg", "transfer", "notable", "occurrence")


def rows(store: Store, table: str) -> list[tuple[Any, ...]]:
    return store.select(f"FROM {table} ORDER BY ALL").values


def test_what_is_kept_in_part_is_what_is_kept_at_once(tmp_path: Path) -> None:
    """Every process's events come late by a time of its own, as from folders that are copied now and then."""
    events = pa.concat_tables(batches(SMALL))
    events = events.set_column(1, "stage", events.column("stage").cast(pa.string()))
    late_ns = np.random.default_rng(3).integers(0, 900, 64) * MS
    process, times = (events.column(name).to_numpy() for name in ("process", "t_ns"))
    arrived = events.take(np.argsort(times + late_ns[process], kind="stable"))
    with (
        Store.open(tmp_path / "parts.duckdb", "write") as parts,
        Store.open(tmp_path / "whole.duckdb", "write") as whole,
    ):
        for store in (parts, whole):
            store.append("process", processes(SMALL))
        for portion in (arrived.slice(first, 1200) for first in range(0, len(arrived), 1200)):
            parts.append("event", portion)
            keeping.refresh(parts, int(portion.column("t_ns").to_numpy().min()))
        whole.append("event", arrived)
        keeping.refresh(whole)

        for table in KEPT:
            assert rows(parts, table) == rows(whole, table), table
        assert len(rows(whole, "transfer")) > 150
        assert len(rows(whole, "leg")) > 400
        assert len(rows(whole, "step")) > 500


def test_a_process_whose_core_shows_up_later_moves_to_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        append_process(store, 2, pid=11, parent=10, started_ns=2, kind="worker", rank="0")
        store.execute("UPDATE process SET first_ns = $t", {"t": MS})
        append_events(store, (2, "step.started", 2, "", "", 5, 0, 0, 0))
        assert [(row["process"], row["engine"]) for row in store.rows("FROM step")] == [(2, "")]

        append_process(store, 1, pid=10, started_ns=1, kind="core", engine_id="P")
        store.execute("DELETE FROM process WHERE process = 2")
        append_process(store, 2, pid=11, parent=10, started_ns=2, kind="worker", engine_id="P", rank="0")
        store.execute("UPDATE process SET first_ns = $t", {"t": MS})
        keeping.refresh(store, 3 * MS)

        assert [(row["process"], row["engine"]) for row in store.rows("FROM step")] == [(1, "P")]


def test_a_process_that_says_what_it_is_before_it_emits_costs_nothing(tmp_path: Path) -> None:
    """An engine that starts beside a long recording: what was kept before stays as it is, not worked out again."""
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        store.append("process", processes(SMALL))
        store.append("event", pa.concat_tables(batches(SMALL)))
        append_process(store, 900, pid=10, started_ns=1, kind="core")
        keeping.refresh(store)
        store.execute("DELETE FROM notable")
        last_ns = store.select("SELECT max(t_ns) FROM event").values[0][0]
        store.execute("DELETE FROM process WHERE process = 900")
        append_process(store, 900, pid=10, started_ns=1, kind="core", engine_id="N")
        keeping.refresh(store, last_ns)

        assert store.rows("SELECT engine FROM place WHERE process = 900") == [{"engine": "N"}]
        assert not rows(store, "notable")


def spread(path: Path) -> None:
    """Write requests of an hour and more, with times that differ, counted window by window as a recorder does."""
    rng = np.random.default_rng(5)
    sample = Sample()
    for number in range(1500):
        spent = [int(value) for value in rng.integers(1, 400, 3)]
        way = (
            ("prefill.queue", "compute.queue", "prefill", "", spent[0]),
            ("prefill.forward", "compute.run", "prefill", "", spent[1]),
            *((("wire", "transfer", "transfer", "", spent[2]),) if number % 3 else ()),
            ("prefill.queue", "compute.queue", "prefill", "", 1),
        )
        mode = "push" if number % 2 else "pull"
        sample.add(f"r{number}", way, PUSH_HIDDEN, start_ms=3 * number * 1000, mode=mode)
        sample.add_pace(f"r{number}", (("decode.token", "compute.run", spent[0]),), (10, 10))
    sample.write(path)


EXACT = {
    "causes": """
SELECT mode, cause, count(*) AS requests, sum(ns)::DOUBLE / 1e6 AS total_ms, quantile_cont(ns, 0.5) / 1e6 AS p50_ms,
  quantile_cont(ns, 0.99) / 1e6 AS p99_ms
FROM (
  SELECT r.mode, s.cause, sum(s.end_ns - s.start_ns)::BIGINT AS ns
  FROM segment AS s JOIN request AS r USING (request_key)
  WHERE r.start_ns >= $from AND r.start_ns < $to GROUP BY r.mode, s.cause, r.request_key
) GROUP BY ALL""",
    "hidden_work": """
SELECT h.cause, count(DISTINCT h.request_key) AS requests, quantile_cont(h.duration_ns, 0.5) / 1e6 AS p50_ms,
  quantile_cont(h.slack_ns, 0.5) / 1e6 AS slack_p50_ms, min(h.slack_ns) / 1e6 AS slack_min_ms
FROM hidden AS h JOIN request AS r USING (request_key) WHERE r.start_ns >= $from AND r.start_ns < $to GROUP BY ALL""",
    "itl_parts": """
SELECT r.mode, q.cause, count(*) AS requests, sum(q.duration_ns) / sum(p.tokens) / 1e6 AS ms_per_token
FROM pace_part AS q JOIN pace AS p USING (request_key) JOIN request AS r USING (request_key)
WHERE r.start_ns >= $from AND r.start_ns < $to GROUP BY ALL""",
}
"""The same questions, asked of every request."""


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hour") / "run.duckdb"
    spread(path)
    return path


@pytest.mark.parametrize("name", sorted(EXACT))
@pytest.mark.parametrize(
    ("from_s", "to_s"), [(None, None), (7, 4_400), (29, 31), (100, 115), (0, 1_800), (1_790, 3_700)]
)
def test_counted_windows_and_what_lies_beside_them_give_the_whole(
    hour: Path, name: str, from_s: int | None, to_s: int | None
) -> None:
    """Numbers and sums are exact, percentiles within a bucket, wherever the time asked for begins and ends."""
    span = {"from": START_NS + (from_s or 0) * 1000 * MS, "to": START_NS + (to_s or 10_000) * 1000 * MS}
    given = {} if from_s is None else {"from_ns": str(span["from"]), "to_ns": str(span["to"])}
    with Store.open(hour) as store:
        query = queries.load(name)
        found = store.rows(query.sql, query.bind(given))
        expected = store.rows(EXACT[name], span)

    keys = [key for key in ("mode", "cause") if key in expected[0]]
    told = {tuple(row[key] for key in keys): row for row in found}
    assert len(told) == len(expected)
    for row in expected:
        seen = told[tuple(row[key] for key in keys)]
        for column in set(row) - set(keys):
            slack = 1 / 32 if "_p" in f"_{column}" and "per" not in column else 1e-9
            assert seen[column] == pytest.approx(row[column], rel=slack), column


def test_windows_are_counted_once_they_are_over_and_again_where_a_request_changed(hour: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run.duckdb"
    copy.write_bytes(hour.read_bytes())
    with Store.open(copy, "write") as store:
        counted = rows(store, "tally")
        last_ns = store.select("SELECT max(start_ns) FROM request").values[0][0]
        changed_ns = START_NS + 60_000 * MS
        store.execute(
            "DELETE FROM tally WHERE from_ns >= $late", {"late": START_NS // COARSE_NS * COARSE_NS + COARSE_NS}
        )
        store.execute("DELETE FROM tally WHERE from_ns = $old", {"old": changed_ns // FINE_NS * FINE_NS})
        keeping.refresh(store, last_ns, [changed_ns])

        newest_ns = last_ns - 30_000 * MS - FINE_NS
        assert rows(store, "tally") == [row for row in counted if row[1] == COARSE_NS or row[2] <= newest_ns]


def test_an_analysis_in_part_counts_what_it_changed(tmp_path: Path) -> None:
    """A recording goes on for a minute and a half; its counted windows are those of the whole."""
    fleet = Fleet(180, seed=9, per_s=2.0, pairs=1)
    events = pa.concat_tables(batches(fleet))
    events = events.filter(np.array([not name.startswith("sender.") for name in events.column("stage").to_pylist()]))
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        store.append("process", processes(fleet))
        size = -(-len(events) // 6)
        for portion in (events.slice(first, size) for first in range(0, len(events), size)):
            store.append("event", portion)
            analyze(store, int(portion.column("t_ns").to_numpy().min()))
        counted = rows(store, "tally")
        assert len({row[2] for row in counted}) > 1
        newest_ns = max(row[2] for row in counted)
        keeping.refresh(store)
        assert [row for row in rows(store, "tally") if row[2] <= newest_ns] == counted
