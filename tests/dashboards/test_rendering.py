"""The boards as Grafana's own packages draw them in headless Chromium: no error, no empty panel, the query's values.

What cannot be drawn here is the trace panel, which is a part of Grafana's server; its rows are tested elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtrace.dashboards import files
from kvtrace.dashboards.sources import DUCKDB
from kvtrace.store import Store
from tests.dashboards import browser, tools
from tests.dashboards.endpoint import Answer, Shown, answer_from, opened, served
from tests.dashboards.stores import FROM_MS, TO_MS, write_empty, write_full

WIDTH = 1600
TOP_HEIGHT = 1090
DRAWN_SECONDS = 120
BOARDS = {board.uid: board.to_json() for board in files.boards()}
PICTURES = tools.ROOT / ".dashboards" / "pictures"
# What a unit stands for in the unit of the column; Grafana's formats pick the one that suits the value.
SCALES = {
    "ms": {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "mins": 6e4},
    "ns": {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9},
    "µs": {"ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6},
    "percentunit": {"%": 0.01},
    "reqps": {"req/s": 1.0},
    "mbytes": {"MiB": 1.0, "GiB": 1024.0, "KiB": 1 / 1024},
    "kbytes": {"KiB": 1.0, "MiB": 1024.0, "B": 1 / 1024},
    "bytes": {"B": 1.0, "KiB": 1024.0, "MiB": 1048576.0},
    "s": {"ms": 1e-3, "s": 1.0, "min": 60.0, "mins": 60.0, "µs": 1e-6},
    "none": {"": 1.0, "K": 1e3},
    "": {"": 1.0, "K": 1e3},
}

pytestmark = pytest.mark.dashboards


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the browser made of a board: panels that it drew, those without data, their texts, errors, the SQL asked."""

    drawn: dict[str, dict[str, bool]]
    texts: dict[str, str]
    failures: list[str]
    asked: list[str]
    labels: list[str]


def draw(chromium: str, shown: Shown, answer: Answer, picture: Path, expected: int) -> Drawing:
    """Draw a board until `expected` panels have their data, and keep its picture for people to look at."""
    with served(tools.page(), shown, answer) as address:
        return asyncio.run(_drawn(chromium, address, expected, picture))


async def _drawn(chromium: str, address: str, expected: int, picture: Path) -> Drawing:
    async with browser.tab(chromium, address, WIDTH, 1000) as tab:
        assert await tab.until("window.boardHeight > 0", DRAWN_SECONDS), await tab.value("window.failures")
        height = await tab.value("window.boardHeight")
        await tab.resize(WIDTH, height)
        await tab.until(f"Object.keys(window.drawn).length >= {expected}", DRAWN_SECONDS)
        # Some is drawn only after its data has come.
        texts = await tab.settled(
            "Object.fromEntries([...document.querySelectorAll('[data-panel]')]"
            ".map((panel) => [panel.dataset.panel, panel.innerText]))",
            DRAWN_SECONDS,
        )
        labels = await tab.value("[...document.querySelectorAll('label')].map((label) => label.innerText)")
        drawn, failures, asked = [await tab.value(f"window.{name}") for name in ("drawn", "failures", "asked")]
        _keep(picture, await tab.picture(WIDTH, height), await tab.picture(WIDTH, TOP_HEIGHT))
        return Drawing(drawn, texts, failures, asked, labels)


def _keep(picture: Path, whole: bytes, top: bytes) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(whole)
    picture.with_name(f"{picture.stem}-top.png").write_bytes(top)


def panels_of(uid: str) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[uid]["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module", params=["made up", "recorded"])
def store_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the store to draw: a small one made up, then what `make dashboards-test` recorded in a lab."""
    if request.param == "made up":
        return write_full(tmp_path_factory.mktemp("full") / "run.duckdb")
    recording = Path(os.environ.get("KVTRACE_RECORDING", tools.HOME / "recording.duckdb"))
    if not recording.exists():
        pytest.skip("make dashboards-test records a lab")
    return recording


def span_of(store: Store) -> tuple[int, int]:
    (row,) = store.rows(
        "SELECT min(start_ns) // 1000000 AS a, max(coalesce(end_ns, start_ns)) // 1000000 + 1 AS b FROM request"
    )
    return row["a"], row["b"]


@pytest.mark.parametrize("uid", ["kvtrace-handoff", "kvtrace-request"])
def test_a_board_is_drawn_with_the_values_of_its_queries(uid: str, store_path: Path, chromium: str) -> None:
    panels = panels_of(uid)
    with Store.open(store_path) as store:
        slowest = store.rows("SELECT request_id FROM request WHERE ttft_ns IS NOT NULL ORDER BY ttft_ns DESC LIMIT 1")
        shown = opened(BOARDS[uid], store, *span_of(store), request=slowest[0]["request_id"])
        answers: dict[str, list[dict[str, Any]]] = {}
        answer = answer_from(store)

        def remembered(query: Any) -> list[dict[str, Any]]:
            answers[query["target"]["rawSql"]] = frames = answer(query)
            return frames

        drawing = draw(chromium, shown, remembered, PICTURES / f"{uid}.png", len(panels))

    assert drawing.failures == []
    assert drawing.drawn.keys() == {panel["title"] for panel in panels}
    for panel in panels:
        (frame,) = answers[panel["targets"][0]["rawSql"]]
        rows = len(frame["fields"][0]["values"])
        assert drawing.drawn[panel["title"]]["empty"] == (rows == 0), panel["title"]
        check_values(panel, frame, drawing.texts[panel["title"]])
    for variable in BOARDS[uid]["templating"]["list"]:
        assert variable["label"] in drawing.labels


def test_an_empty_store_shows_empty_panels_and_no_error(tmp_path: Path, chromium: str) -> None:
    uid = "kvtrace-handoff"
    with Store.open(write_empty(tmp_path / "run.duckdb")) as store:
        shown = opened(BOARDS[uid], store, FROM_MS, TO_MS)
        drawing = draw(chromium, shown, answer_from(store), PICTURES / "empty.png", len(panels_of(uid)))

    assert drawing.failures == []
    assert {title for title, state in drawing.drawn.items() if not state["empty"]} == {"Recorded", "Recorder"}


def test_a_hostile_id_is_text_and_nothing_else(tmp_path: Path, chromium: str) -> None:
    """An id of markup, quotes and a variable's form, stored as a request's, asked for and drawn."""
    hostile = "<img src=x onerror=\"window.failures.push('xss')\">'; DROP TABLE request; -- ${run}"
    uid = "kvtrace-request"
    path = write_full(tmp_path / "run.duckdb")
    with Store.open(path, "write") as store:
        store.execute("UPDATE request SET request_id = $id WHERE request_id = 'push-1'", {"id": hostile})
    with Store.open(path) as store:
        shown = opened(BOARDS[uid], store, FROM_MS, TO_MS, request=hostile)
        drawing = draw(chromium, shown, answer_from(store), PICTURES / "hostile.png", len(panels_of(uid)))

    assert drawing.failures == []
    assert not drawing.drawn["Critical path"]["empty"]
    assert "<img src=x" in drawing.texts["Facts"]


# Values on the screen ----------------------------------------------------------------------------------


def check_values(panel: dict[str, Any], frame: dict[str, Any], text: str) -> None:
    """Raise unless what the panel shows is what the query gave, to the digits that are shown."""
    if panel["type"] in ("stat", "bargauge"):
        for column in frame["fields"]:
            if column["values"] and column["values"][-1] is not None:
                assert_shown(panel, column["name"], column["values"][-1], after(text, label_of(panel, column["name"])))
    if panel["type"] == "timeseries" and frame["fields"][0]["values"]:
        for column in frame["fields"][1:]:
            known = [value for value in column["values"] if value is not None]
            if known and (lines := after(text, label_of(panel, column["name"]), needed=False)):
                assert_shown(panel, column["name"], sum(known) / len(known), lines)
                assert_shown(panel, column["name"], max(known), lines[1:])
    if panel["type"] == "table" and frame["fields"][0]["values"]:
        check_first_row(panel, frame, text)


def check_first_row(panel: dict[str, Any], frame: dict[str, Any], text: str) -> None:
    """Compare the first row of a table, as far as its columns are on the screen."""
    columns = [column for column in frame["fields"] if not is_hidden(panel, column["name"])]
    lines = text.split("\n")
    headers = [label_of(panel, column["name"]) for column in columns]
    shown = next((at for at, header in enumerate(headers) if at >= len(lines) or lines[at] != header), len(headers))
    assert shown >= min(3, len(headers)), f"{panel['title']}: {lines[: len(headers)]} are not {headers}"
    for column, cell in zip(columns[:shown], lines[shown:], strict=False):
        value = column["values"][0]
        if value is None or value == "":
            return  # an empty cell leaves no line, so that those after it cannot be told apart
        if column["type"] == "number":
            assert_shown(panel, column["name"], value, [cell])
        elif column["type"] == "string":
            assert cell == value


def assert_shown(panel: dict[str, Any], column: str, value: float, lines: list[str]) -> None:
    """Raise unless the first line is the value in the column's unit: `1.22 s` of 1,218 ms."""
    unit = property_of(panel, column, "unit", panel["fieldConfig"]["defaults"].get("unit", ""))
    found = re.fullmatch(r"(-?[\d.,]+) ?(\D*)", lines[0].strip())
    assert found, f"{panel['title']}, {column}: {lines[0]!r} is no number"
    digits = found[1].replace(",", "")
    scale = SCALES[unit][found[2].strip()]
    last_place = 10.0 ** -len(digits.partition(".")[2]) * scale
    assert float(digits) * scale == pytest.approx(value, abs=0.51 * last_place, rel=1e-6), f"{panel['title']}, {column}"


def after(text: str, label: str, *, needed: bool = True) -> list[str]:
    """Return the lines after the one that is the label (a legend adds the axis to it)."""
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if line == label or line.startswith(f"{label} (right"):
            return lines[at + 1 :]
    assert not needed, f"{label} is not in {lines}"
    return []


def label_of(panel: dict[str, Any], column: str) -> str:
    return str(property_of(panel, column, "displayName", column))


def is_hidden(panel: dict[str, Any], column: str) -> bool:
    return bool(property_of(panel, column, "custom.hidden", False))


def property_of(panel: dict[str, Any], column: str, name: str, default: Any) -> Any:
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == column:
            for one in override["properties"]:
                if one["id"] == name:
                    return one["value"]
    return default


def test_the_boards_drawn_here_are_those_on_duckdb() -> None:
    """Live is drawn in the tests with a real Prometheus."""
    assert {uid for uid in BOARDS if panels_of(uid)[0]["datasource"]["type"] == DUCKDB} == {
        "kvtrace-handoff",
        "kvtrace-request",
    }
