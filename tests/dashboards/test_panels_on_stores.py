"""Every panel's SQL as it reaches DuckDB, on real stores: 2.x here, the plug-in's 1.5 in an environment of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kvtrace import queries
from kvtrace.dashboards import files
from kvtrace.dashboards.sources import DUCKDB
from kvtrace.store import Rows, Store
from tests.dashboards import tools
from tests.dashboards.grafana import asked, expanded, interpolated, situation_of
from tests.dashboards.stores import FROM_MS, TO_MS, write_empty, write_full

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOARDS = {board.uid: board.to_json() for board in files.boards()}
PANELS = [
    (uid, panel)
    for uid, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row" and panel["datasource"]["type"] == DUCKDB
]
SITUATIONS = {
    "kvtrace-handoff": {"scope": "router"},
    "kvtrace-request": {"request": "push-1"},
}
# Types that the plug-in gives as something to draw or to read; HUGEINT, for one, it would give as text.
PLOTTABLE = {"BIGINT", "INTEGER", "DOUBLE", "VARCHAR", "BOOLEAN", "TIMESTAMP WITH TIME ZONE", "stage"}


def name_of(value: Any) -> str:
    return value["title"] if isinstance(value, dict) else str(value)


def sql_of(uid: str, panel: dict[str, Any], **chosen: str) -> str:
    situation = situation_of(BOARDS[uid], FROM_MS, TO_MS, **{**SITUATIONS[uid], **chosen})
    return asked(panel["targets"][0], situation)


def variables() -> list[tuple[str, dict[str, Any]]]:
    return [
        (uid, variable)
        for uid, board in BOARDS.items()
        for variable in board["templating"]["list"]
        if variable["type"] == "query" and variable["datasource"]["type"] == DUCKDB
    ]


@pytest.fixture(scope="module")
def full_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full(tmp_path_factory.mktemp("full") / "run.duckdb")


@pytest.fixture(scope="module")
def empty_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_empty(tmp_path_factory.mktemp("empty") / "run.duckdb")


@pytest.fixture(scope="module")
def full(full_path: Path) -> Iterator[Store]:
    with Store.open(full_path) as store:
        yield store


@pytest.fixture(scope="module")
def empty(empty_path: Path) -> Iterator[Store]:
    with Store.open(empty_path) as store:
        yield store


@pytest.mark.parametrize(("uid", "panel"), PANELS, ids=name_of)
def test_a_panel_has_rows_where_there_is_data_and_none_where_there_is_not(
    uid: str, panel: dict[str, Any], full: Store, empty: Store
) -> None:
    """The recording and the time span of an empty store are one row each, of zeros and nothings.

    Overrides name columns that the panel has; where it is drawn over time, that goes forward and within the range.
    """
    sql = sql_of(uid, panel)
    assert "${" not in sql
    assert "$__" not in sql

    rows, none = full.select(sql), empty.select(sql)
    assert rows.values, panel["title"]
    assert set(rows.types) <= PLOTTABLE
    assert any(value is not None for value in rows.values[0])
    assert len(none.values) == (1 if panel["title"] in ("Recorded", "Recorder") else 0)
    overrides = panel.get("fieldConfig", {}).get("overrides", [])
    assert {override["matcher"]["options"] for override in overrides} <= set(none.columns)
    if panel["type"] == "timeseries":
        times = [row[0].timestamp() * 1000 for row in rows.values]
        assert rows.types[0] == "TIMESTAMP WITH TIME ZONE"
        assert times == sorted(set(times))
        assert all(FROM_MS <= t <= TO_MS for t in times)


def test_a_panel_gives_what_its_query_gives(full: Store) -> None:
    """`kvtrace sql RUN.duckdb causes` and the panel: the same rows in the same order."""
    panel = next(panel for _, panel in PANELS if panel["title"] == "Causes, costliest first")
    query = queries.load("causes")

    shown = full.select(sql_of("kvtrace-handoff", panel))
    direct = full.select(query.sql, query.bind({"scope": "router"}))

    places = [direct.columns.index(name) for name in shown.columns]
    assert shown.values == [tuple(row[at] for at in places) for row in direct.values]


def test_the_request_board_gives_the_nanoseconds_of_the_store(full: Store) -> None:
    titles = {panel["title"]: panel for uid, panel in PANELS if uid == "kvtrace-request"}
    (request,) = full.rows("SELECT * FROM request WHERE request_id = 'push-1'")

    path = rows_of(full.select(sql_of("kvtrace-request", titles["Critical path"])))
    (summary,) = rows_of(full.select(sql_of("kvtrace-request", titles["Time to first token, and its classes"])))
    spans = rows_of(full.select(sql_of("kvtrace-request", titles["Waterfall"])))

    assert sum(row["duration_ns"] for row in path) == summary["ttft_ns"] == request["ttft_ns"]
    for name in ("coordination", "transfer", "unattributed"):
        assert summary[f"{name}_ns"] == request[f"{name}_ns"]
        assert sum(row["duration_ns"] for row in path if row["class"] == name) == request[f"{name}_ns"]
    on_path = [span for span in spans if span["parentSpanID"] == "path"]
    assert [round(span["duration"] * 1e6) for span in on_path] == [row["duration_ns"] for row in path]


def test_spans_have_the_form_of_grafanas_trace_panel(full: Store) -> None:
    """Text for ids and names, numbers in ms for times, one root, parents that exist."""
    (panel,) = [panel for _, panel in PANELS if panel["type"] == "traces"]
    rows = full.select(sql_of("kvtrace-request", panel))

    assert dict(zip(rows.columns, rows.types, strict=True)) == {
        "traceID": "VARCHAR", "spanID": "VARCHAR", "parentSpanID": "VARCHAR", "operationName": "VARCHAR",
        "serviceName": "VARCHAR", "startTime": "DOUBLE", "duration": "DOUBLE",
    }  # fmt: skip
    spans = rows_of(rows)
    ids = [span["spanID"] for span in spans]
    assert len(set(ids)) == len(ids)
    assert [span["spanID"] for span in spans if not span["parentSpanID"]] == [ids[0]]
    assert all(span["parentSpanID"] in ids for span in spans[1:])
    assert all(FROM_MS <= span["startTime"] <= TO_MS for span in spans)


@pytest.mark.parametrize(
    ("uid", "variable"), variables(), ids=lambda value: str(value.get("name", "")) if isinstance(value, dict) else value
)
def test_variables_list_what_is_there(uid: str, variable: dict[str, Any], full: Store, empty: Store) -> None:
    sql = interpolated(variable["query"], situation_of(BOARDS[uid], FROM_MS, TO_MS))

    expected = {"model": ["tiny"], "prefill": ["p0"], "decode": ["d0"], "mode": ["pull", "push"], "scope": ["router"]}
    assert [row[0] for row in full.select(sql).values] == expected[variable["name"]]
    assert empty.select(sql).values == []


HOSTILE = (
    "x' OR '1'='1",
    "'; DROP TABLE request; --",
    "${mode:sqlstring}",
    "$__timeFrom()",
    "\\'",
    "\n\x00\x1b[31m",
    "é" * 5000,
)


@pytest.mark.parametrize("given", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_choice_selects_nothing_and_breaks_nothing(given: str, full: Store) -> None:
    """Of a hostile id nothing is executed: no rows, or at worst a parser's complaint where it holds a macro."""
    for uid, panel in PANELS:
        for name in SITUATIONS[uid]:
            if f"${{{name}:" in panel["targets"][0]["rawSql"]:
                situation = situation_of(BOARDS[uid], FROM_MS, TO_MS, **{name: given})
                sql = interpolated(panel["targets"][0]["rawSql"], situation)
                assert full.select(sql).values == []


def test_an_id_with_quotes_is_found(tmp_path: Path) -> None:
    """Grafana escapes them in its own way."""
    name = """it's "r1" \\ and ${run}"""
    panel = next(panel for uid, panel in PANELS if panel["title"] == "Facts")
    path = write_full(tmp_path / "run.duckdb")
    with Store.open(path, "write") as store:
        store.execute("UPDATE request SET request_id = $id WHERE request_id = 'push-1'", {"id": name})
    with Store.open(path) as store:
        sql = interpolated(panel["targets"][0]["rawSql"], situation_of(BOARDS["kvtrace-request"], 0, 1, request=name))
        assert [row[0] for row in store.select(sql).values] == [name]


def test_all_and_nothing_typed_select_everything(full: Store) -> None:
    panel = next(panel for _, panel in PANELS if panel["title"] == "Slowest requests")

    everything = full.select(sql_of("kvtrace-handoff", panel, scope=""))
    assert len(everything.values) == 7
    assert len(full.select(sql_of("kvtrace-handoff", panel, mode="pull")).values) == 1


def test_macros_are_expanded_as_the_plug_in_does() -> None:
    """Whole seconds, which is why panels take the front end's milliseconds instead."""
    situation = situation_of(BOARDS["kvtrace-request"], 1_700_000_000_123, 1_700_000_000_900)

    assert expanded("WHERE $__timeFilter(ts)", situation) == (
        "WHERE ts >= '2023-11-14T22:13:20Z' AND ts <= '2023-11-14T22:13:20Z'"
    )
    assert interpolated("${__from:raw}", situation) == "1700000000123"


@pytest.mark.dashboards
def test_the_duckdb_of_the_plug_in_gives_the_same_rows(full: Store, empty: Store, tmp_path: Path) -> None:
    """Opened read-write, as the plug-in does; floats may differ in their last digits."""
    python = tools.old_duckdb_python()
    for store in (full, empty):
        copy = shutil.copy(store.path, tmp_path / store.path.parent.name)
        statements = [sql_of(uid, panel) for uid, panel in PANELS]
        statements += [
            interpolated(variable["query"], situation_of(BOARDS[uid], FROM_MS, TO_MS)) for uid, variable in variables()
        ]
        done = subprocess.run(
            [python, "-m", "tests.dashboards.other_duckdb"],
            input=json.dumps({"path": str(copy), "asked": statements}),
            cwd=tools.ROOT, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        reply = json.loads(done.stdout)

        assert reply["version"].startswith("1.5.")
        for sql, answer in zip(statements, reply["answers"], strict=True):
            assert "error" not in answer, f"{answer['error']}\n{sql}"
            rows = store.select(sql)
            assert answer["columns"] == list(rows.columns)
            assert [["stage" if t.startswith("ENUM") else t for t in answer["types"]]] == [list(rows.types)]
            assert len(answer["rows"]) == len(rows.values)
            for theirs, ours in zip(answer["rows"], rows.values, strict=True):
                assert theirs == [comparable(value) for value in ours]


def comparable(value: Any) -> Any:
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-9)
    return round(value.timestamp() * 1_000_000) if hasattr(value, "timestamp") else value


def rows_of(rows: Rows) -> list[dict[str, Any]]:
    return [dict(zip(rows.columns, row, strict=True)) for row in rows.values]
