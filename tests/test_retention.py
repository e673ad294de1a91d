"""What is too old or too much leaves a recording, and what is left answers as if nothing else had been there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from kvtrace import cli, keeping, queries, schema
from kvtrace.analyze import analyze
from kvtrace.cli import bounds
from kvtrace.collect import Recorder
from kvtrace.collect.retention import LEAST_NS, Retention
from kvtrace.errors import UsageError
from kvtrace.schema.keeping import FINE_NS
from kvtrace.store import Store, working_path
from kvtrace.store.retention import forget_before
from tests.sample_store import MS, PUSH_HIDDEN, PUSH_PATH, START_NS, Sample
from tests.test_analyze import fill
from tests.test_keeping import rows
from tests.test_schema import append_process
from tests.trace import ns, pull, push

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.trace import Trace

HOURS = 3
EVERY_S = 20
COUNT = HOURS * 3600 // EVERY_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of three hours that end now: a request every twenty seconds, ten events with each."""
    shift_ms = (time.time_ns() - START_NS) // MS - HOURS * 3_600_000
    sample = Sample()
    for number in range(COUNT):
        sample.add(f"r{number}", PUSH_PATH, PUSH_HIDDEN, start_ms=shift_ms + number * EVERY_S * 1000)
    path = sample.write(tmp_path / "run.duckdb")
    starts = [row["start_ns"] for row in sample.requests]
    rows = [
        {"process": 1, "stage": "prefill.enqueued", "t_ns": start_ns + step, "request": f"{number}-{step}" * 4}
        for number, start_ns in enumerate(starts) for step in range(10)
    ]  # fmt: skip
    with Store.open(path, "write") as store:
        append_process(store, 1, kind="core", engine_id="P")
        store.append("event", pa.Table.from_pylist([{**row, "ref": "", **dict.fromkeys("abcd", 0)} for row in rows]))
        keeping.refresh(store)
    return path


def whole_and_rest(store: Store) -> dict[str, tuple[int, ...]]:
    asked = ["event", "request", "segment", "hidden", "leg", "tally", "occurrence"]
    return {name: store.select(f"SELECT count(*) FROM {name}").values[0] for name in asked}  # noqa: S608 -- names of ours


def causes(store: Store) -> list[dict[str, Any]]:
    query = queries.load("causes")
    return store.rows(query.sql, query.bind({}))


def test_what_is_older_goes_with_everything_made_of_it(path: Path) -> None:
    with Store.open(path, "write") as store:
        retention = Retention(age_s=3600.0)
        gone = retention.apply(store)
        left = store.select("SELECT count(*), min(start_ns) FROM request").values[0]
        oldest = store.select("SELECT min(t_ns) FROM event").values[0][0]
        found = causes(store)
        keeping.refresh(store)
        resumed = Retention()
        resumed.resume({row["name"]: row["value"] for row in store.rows("FROM run")})

        assert resumed.facts() == retention.facts() == {
            "recorder.kept_from_ns": str(retention.forgotten_ns), "recorder.dropped_requests": str(gone),
        }  # fmt: skip
        assert gone == pytest.approx(2 * 3600 // EVERY_S, abs=3)
        assert left[0] == COUNT - gone
        assert time.time_ns() - 3600 * 10**9 - 2 * FINE_NS < oldest <= left[1] + EVERY_S * 10**9
        assert {row["requests"] for row in found} == {left[0]}
        assert found == causes(store)
        for table in schema.ANSWERS:
            stray = f"SELECT count(*) FROM {table} WHERE request_key NOT IN (SELECT request_key FROM request)"  # noqa: S608 -- names of ours
            assert store.select(stray).values == [(0,)]
        assert store.select("SELECT min(first_ns) FROM leg").values[0][0] == oldest


def test_nothing_is_dropped_within_bounds(path: Path) -> None:
    with Store.open(path, "write") as store:
        before = whole_and_rest(store)

        assert Retention(age_s=4 * 3600.0, size_bytes=10**9).apply(store) == 0
        assert Retention().apply(store) == 0
        assert whole_and_rest(store) == before


def test_a_store_that_is_too_large_gives_up_its_oldest_part(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.execute("CHECKPOINT")
        used = store.used_bytes()
        retention = Retention(size_bytes=used // 2)
        gone = retention.apply(store)

        assert 0.4 * COUNT < gone < 0.7 * COUNT
        assert retention.apply(store) == 0  # not again within a minute
        assert store.select("SELECT min(start_ns) FROM request").values[0][0] >= retention.forgotten_ns


def test_what_is_under_way_is_kept_however_large_it_is(path: Path) -> None:
    with Store.open(path, "write") as store:
        Retention(size_bytes=1).apply(store)
        count, oldest = store.select("SELECT count(*), min(start_ns) FROM request").values[0]

        assert count == pytest.approx(LEAST_NS / 1e9 / EVERY_S, abs=3)
        assert oldest < time.time_ns() - LEAST_NS + 2 * EVERY_S * 10**9


@pytest.mark.parametrize("hand_off", [push, pull])
@pytest.mark.parametrize("after_ms", [20, 34, 50, 75])
def test_half_a_request_is_not_left(tmp_path: Path, hand_off: Callable[..., Trace], after_ms: int) -> None:
    """The bound lies within one hand-off; what is left, worked out anew, is what it was."""
    before_ns = ns(600_000) // FINE_NS * FINE_NS
    offset_ms = (before_ns - ns(0)) / MS - after_ms
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        for number, by_ms in enumerate((offset_ms - 300, offset_ms, offset_ms + 300)):
            fill(store, hand_off(name=f"r{number}").later(by_ms, 100 * number))
        analyze(store)
        assert forget_before(store, before_ns) == 2
        kept = {table: rows(store, table) for table in ("leg", "transfer", "notable", "occurrence")}
        analyze(store)

        assert [(row["request_id"], row["verdict"]) for row in store.rows("FROM request")] == [("r2", "complete")]
        assert {table: [row for row in rows(store, table) if 0 not in row[3:]] for table in kept} == {
            table: [row for row in found if 0 not in row[3:]] for table, found in kept.items()
        }


def test_a_resumed_recording_counts_on_what_was_dropped(tmp_path: Path) -> None:
    said = {"recorder.kept_from_ns": "5", "recorder.dropped_requests": "7"}
    with Store.open(working_path(tmp_path / "run.duckdb"), "write") as store:
        store.remember(said)

    retention = Retention()

    Recorder(tmp_path / "run.duckdb", [tmp_path], {}, retention=retention).run_once()

    assert retention.facts() == said


def test_bounds_are_read_and_nonsense_is_named() -> None:
    found = bounds.retention("1.5h", "20GB")

    assert (found.age_s, found.size_bytes) == (5400.0, 20_000_000_000)
    for age, size in (("soon", None), ("5", None), ("0h", None), (None, "many"), (None, "-1GB"), ("10m", None)):
        with pytest.raises(UsageError, match="--retain"):
            bounds.retention(age, size)


def test_record_refuses_a_bound_or_a_copy_that_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    base = ["record", "-o", str(tmp_path / "run.duckdb"), "--once", "--spool", str(tmp_path)]
    for code, *options in (
        (2, "--retain-age", "soon"), (2, "--grafana-copy", str(tmp_path / "run.duckdb")),
        (1, "--grafana-copy", str(foreign)), (2, "--grafana-copy", str(tmp_path / "run.duckdb.working")),
        (1, "--grafana-copy", str(tmp_path)), (1, "--grafana-copy", str(tmp_path / "no" / "copy.duckdb")),
    ):  # fmt: skip
        assert cli.main([*base, *map(str, options)]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert options[1] in line
    assert foreign.read_text() == "mine"
