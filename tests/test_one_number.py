"""One number, one value: every output gives the same nanoseconds for every class of every request."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvtrace import cli, stages
from kvtrace.exporters import perfetto, source
from kvtrace.store import Store
from tests import exported
from tests.dashboards import browser, endpoint, tools
from tests.dashboards.test_rendering import BOARDS, check_values, draw
from tests.otlp_receiver import RECEIVERS, values
from tests.test_export import otlp_spans

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHARES = (
    "ttft_ns",
    "compute_ns",
    "compute_run_ns",
    "compute_queue_ns",
    "coordination_ns",
    "transfer_ns",
    "unattributed_ns",
)
Numbers = dict[str, tuple[dict[str, int | None], dict[str, int]]]
"""By request id: the shares as stated, and the sums of the segments by class."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported.write(tmp_path_factory.mktemp("store") / "run.duckdb", *exported.varied())


def summed(segments: list[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of (class, ns) by class."""
    found: Counter[str] = Counter()
    for kind, spent_ns in segments:
        found[kind] += spent_ns
    return dict(found)


def of_sql(store: Path) -> Numbers:
    with Store.open(store) as opened:
        stated = opened.rows(f"SELECT request_id, {', '.join(SHARES)} FROM ttft")  # noqa: S608 -- names of ours
        path = opened.rows("SELECT request_id, class, duration_ns FROM critical_path")
    return {
        row["request_id"]: (
            {name: row[name] for name in SHARES},
            summed([(one["class"], one["duration_ns"]) for one in path if one["request_id"] == row["request_id"]]),
        )
        for row in stated
    }


def of_explain(store: Path, capsys: pytest.CaptureFixture[str]) -> Numbers:
    capsys.readouterr()
    assert cli.main(["explain", str(store), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    return {
        one["request_id"]: (
            {name: one[name] for name in SHARES},
            summed([(part["class"], part["end_ns"] - part["start_ns"]) for part in one["segments"]]),
        )
        for one in document["requests"]
    }


def of_spans(spans: list[Any]) -> Numbers:
    found = {}
    for span in spans:
        if span.name == "kvtrace.request":
            attributes = values(span.attributes)
            columns = (attributes.get(f"kvtrace.segments.{name}", []) for name in ("class", "start_ns", "end_ns"))
            parts = [(kind, end - start) for kind, start, end in zip(*columns, strict=True)]
            stated = {name: attributes.get(f"kvtrace.{name}") for name in SHARES}
            found[attributes["kvtrace.request_id"]] = stated, summed(parts)
    return found


def of_perfetto(store: Path) -> Numbers:
    out = io.BytesIO()
    with Store.open(store) as opened:
        perfetto.write(opened, source.Choice(), out)
    read = exported.Reader().parse(out.getvalue())
    return {
        one.notes["request_id"]: (
            {name: one.notes.get(name) for name in SHARES},
            summed([(part.category, part.end_ns - part.start_ns) for part in one.inside]),
        )
        for track, some in read.slices.items()
        if track[0] == perfetto.CRITICAL_PATH
        for one in some
    }


def for_each(board: dict[str, Any], titles: Sequence[str], requests: Sequence[str]) -> dict[str, Any]:
    """Return a board with some panels of the Request board once for every request, each by a variable of its own."""
    row = next(panel for panel in board["panels"] if panel["type"] == "row")
    variables: list[dict[str, Any]] = []
    panels: list[dict[str, Any]] = []
    for one in board["templating"]["list"]:
        copies = [f"request{n}" for n in range(len(requests))] if one["name"] == "request" else [one["name"]]
        variables += [{**one, "name": name} for name in copies]
    for n, title in itertools.product(range(len(requests)), titles):
        text = json.dumps(next(panel for panel in board["panels"] if panel["title"] == title))
        place = {"x": 0, "y": 1 + 6 * len(panels), "w": 24, "h": 6}
        panel = json.loads(text.replace("${request:sqlstring}", f"${{request{n}:sqlstring}}"))
        panels.append({**panel, "id": row["id"] + 1 + len(panels), "title": f"{title} {n}", "gridPos": place})
    return {**board, "templating": {"list": variables}, "panels": [row, *panels]}


@pytest.mark.dashboards
def test_the_request_board_shows_the_same_nanoseconds(store: Path, tmp_path: Path) -> None:
    """Its panels as Grafana's packages draw them, for every request: what they got is exact, what is shown is that."""
    expected = of_sql(store)
    requests = sorted(expected)
    board = for_each(BOARDS["kvtrace-request"], ("Time to first token, and its classes", "Critical path"), requests)
    frames: dict[str, dict[str, Any]] = {}
    with Store.open(store) as opened:
        answer = endpoint.answer_from(opened)

        def remembered(query: Any) -> list[dict[str, Any]]:
            (frames[query["target"]["rawSql"]],) = found = answer(query)
            return found

        chosen = {f"request{n}": request for n, request in enumerate(requests)}
        shown = endpoint.opened(board, opened, 0, 1, **chosen)
        with browser.running(tools.chromium()) as chromium:
            drawing = draw(chromium, shown, remembered, tmp_path / "board.png", 2 * len(requests))

    assert drawing.failures == []
    for n, request in enumerate(requests):
        stated, parts = expected[request]
        summary, path = board["panels"][1 + 2 * n : 3 + 2 * n]
        given = [columns_of(frames[panel["targets"][0]["rawSql"]]) for panel in (summary, path)]
        assert {name: given[0][name] for name in given[0]} == {name: [stated[name]] for name in given[0]}
        assert summed(list(zip(given[1]["class"], given[1]["duration_ns"], strict=True))) == parts
        assert given[0].keys() == {"ttft_ns", *(f"{kind.value.replace('.', '_')}_ns" for kind in stages.Class)}
        assert drawing.drawn[path["title"]]["empty"] == (stated["ttft_ns"] is None)
        for panel in (summary, path):
            check_values(panel, frames[panel["targets"][0]["rawSql"]], drawing.texts[panel["title"]])


def columns_of(frame: dict[str, Any]) -> dict[str, list[Any]]:
    return {column["name"]: column["values"] for column in frame["fields"]}


def test_every_output_gives_the_same_nanoseconds(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain --json`, the SQL views, spans in a file and over both transports, Perfetto's critical-path track."""
    expected = of_sql(store)
    target = tmp_path / "run.jsonl"
    assert cli.main(["export", str(store), "--format", "otlp-json", "-o", str(target)]) == 0
    outputs = {
        "explain": of_explain(store, capsys),
        "otlp-json": of_spans([span for line in otlp_spans(target.read_bytes()) for _, span in line]),
        "perfetto": of_perfetto(store),
    }
    for name, receiver in RECEIVERS.items():
        with receiver() as received:
            arguments = ["export", str(store), "--format", "otlp", "--endpoint", received.endpoint]
            assert cli.main(arguments) == 0
        outputs[name] = of_spans(received.spans())

    assert len(expected) == len(exported.varied())
    for name, found in outputs.items():
        assert found.keys() == expected.keys(), name
        for request, numbers in expected.items():
            assert found[request] == numbers, (name, request[:40])


def test_segments_sum_to_what_is_stated(store: Path) -> None:
    """The comparison above would be worth little if all outputs were wrong alike, or empty."""
    columns = {kind.value: f"{kind.value.replace('.', '_')}_ns" for kind in stages.Class}
    counted = 0
    for stated, parts in of_sql(store).values():
        if stated["ttft_ns"] is None:
            assert parts == {}
            continue
        counted += 1
        assert {columns[kind]: spent_ns for kind, spent_ns in parts.items()} == {
            name: stated[name] for kind, name in columns.items() if kind in parts
        }
        assert sum(parts.values()) == stated["ttft_ns"]

    assert counted >= 10
