"""The stores of the benchmarks: what is laid end to end is what would have been worked out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtrace import analyze, keeping, schema
from kvtrace.schema.keeping import COARSE_NS, FINE_NS
from kvtrace.store import Store
from kvtrace.testing import Fleet
from tests import big_stores

if TYPE_CHECKING:
    from pathlib import Path

COPIES = 4
# Two copies lie in a coarse window that is over then, two in the next one.
SMALL = Fleet(60, seed=7, per_s=40.0, odd_share=0.4, pairs=1, start_ns=1_000_000 * COARSE_NS - 2 * FINE_NS)
KEPT = tuple(table.name for table in schema.KEPT)


def kept(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    return {table: store.select(f"FROM {table} ORDER BY ALL").values for table in KEPT}


def answers(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Return the answers by the ids of their requests; without the numbers of steps, which stand in a text."""
    other = "replace(waited_for, regexp_extract(waited_for, 'step \\d+'), 'step') AS waited_for"
    found = {}
    for table in schema.ANSWERS:
        named = f"REPLACE ({other}) " if table == "segment" else ""
        columns = f"r.request_id, x.* EXCLUDE (request_key) {named}"
        sql = f"SELECT {columns} FROM {table} AS x JOIN request AS r USING (request_key)"  # noqa: S608 -- names of ours
        found[table] = store.select(f"{sql} ORDER BY ALL").values
    return found


def test_copies_are_what_working_them_out_would_give(tmp_path: Path) -> None:
    path = tmp_path / "run.duckdb"
    assert big_stores.span_ns(SMALL) == FINE_NS
    events = big_stores.write(path, COPIES * SMALL.requests, SMALL)
    with Store.open(path, "write") as store:
        assert store.select("SELECT count(*), count(DISTINCT request_id) FROM request").values == [(240, 240)]
        assert store.select("SELECT count(*) FROM event").values == [(events,)]
        copied = kept(store)
        keeping.refresh(store)
        assert kept(store) == copied
        assert all(len(rows) > COPIES for rows in copied.values())
        lengths = store.select("SELECT DISTINCT window_ns, from_ns FROM tally").values
        assert sorted(length for length, _ in lengths) == [FINE_NS] * COPIES + [COARSE_NS]

        copied = answers(store)
        analyze.analyze(store)
        assert answers(store) == copied


def test_a_piece_that_reaches_into_the_next_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big_stores, "_AFTER_NS", 0)
    monkeypatch.setattr(big_stores, "FINE_NS", 2_000_000_000)
    with pytest.raises(ValueError, match="outside of its 2000000000 ns"):
        big_stores.write(tmp_path / "run.duckdb", COPIES * SMALL.requests, SMALL)
