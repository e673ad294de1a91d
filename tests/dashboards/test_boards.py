"""The boards as JSON: complete, without overlaps, of known parts, and the committed files are the generated ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtrace import cli, queries
from kvtrace.dashboards import alerts, files
from kvtrace.dashboards.sources import BINDINGS, DUCKDB, panel_sql
from kvtrace.errors import QueryError
from kvtrace.metrics import names
from kvtrace.palette import CLASS_COLOUR
from kvtrace.report.style import CLASS_STYLE
from kvtrace.stages import Class
from kvtrace.verdict import ABORTED, ALARMING

ROOT = Path(__file__).parent.parent.parent
BOARDS = {board.uid: board.to_json() for board in files.boards()}
PANELS = [(uid, panel) for uid, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
TARGETS = [(uid, panel, target) for uid, panel in PANELS for target in panel["targets"]]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkvtrace_\w+", expression))


def verdicts_in(expression: str) -> set[str]:
    return {verdict for listed in re.findall(r'verdict=~?"([^"]+)"', expression) for verdict in listed.split("|")}


def known_series() -> dict[str, names.Metric]:
    return {series: metric for metric in names.METRICS for series in names.series_of(metric)}


def test_the_committed_files_are_the_generated_ones() -> None:
    assert files.stale(ROOT / "dashboards") == []


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(uid: str) -> None:
    panels = BOARDS[uid]["panels"]
    cells: set[tuple[int, int]] = set()

    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not covered & cells
        cells |= covered


def test_every_panel_says_what_to_use_it_for() -> None:
    listed = (ROOT / "dashboards" / "README.md").read_text()
    for _, panel in PANELS:
        assert re.fullmatch(r"Use it to [a-z].*\.", panel["description"]), panel["title"]
        assert f"| {panel['title']} |" in listed


def test_no_two_columns_are_called_the_same() -> None:
    """Grafana's table tells columns apart by what they are called: of two alike it shows one's values twice."""
    for _, panel in PANELS:
        called = {}
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            column = override["matcher"]["options"]
            called[column] = next((p["value"] for p in override["properties"] if p["id"] == "displayName"), column)
        if "rawSql" in panel["targets"][0] and panel["type"] == "table":
            head = panel["targets"][0]["rawSql"].partition(" FROM (")[0]
            called |= {column: called.get(column, column) for column in re.findall(r'"(\w+)"', head)}

        assert len(set(called.values())) == len(called), panel["title"]


def test_a_bar_is_a_part_of_something() -> None:
    """A share's bar is full at 1, another's at the greatest value of its own column."""
    for _, panel in PANELS:
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            values = {p["id"]: p["value"] for p in override["properties"]}
            if values.get("custom.cellOptions", {}).get("type") == "gauge":
                assert values["min"] == 0
                assert values.get("max") == (1 if values.get("unit") == "percentunit" else None)
                assert panel["fieldConfig"]["defaults"]["fieldMinMax"]


def test_classes_have_the_same_colours_everywhere() -> None:
    """In every override that colours a class, by its name or by what the panel calls it."""
    found: dict[str, set[str]] = {}
    for _, panel in PANELS:
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            values = {p["id"]: p["value"] for p in override["properties"]}
            label = values.get("displayName", override["matcher"]["options"])
            if label in CLASS_COLOUR and "color" in values:
                found.setdefault(label, set()).add(values["color"]["fixedColor"])
            for mapping in values.get("mappings", []):
                for name, result in mapping["options"].items():
                    found.setdefault(name, set()).add(result["color"])

    assert found == {name: {colour} for name, colour in CLASS_COLOUR.items()}
    assert {name: style.colour for name, style in CLASS_STYLE.items()} == dict(CLASS_COLOUR)
    assert set(CLASS_COLOUR) == {kind.value for kind in Class}


def test_class_colours_can_be_told_apart_by_colour_blind_eyes() -> None:
    """The least distance of two classes as dichromats see them (Viénot's matrices, on linear RGB) stays apart."""
    red_blind = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
    green_blind = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))
    for matrix in (red_blind, green_blind):
        seen = []
        for colour in CLASS_COLOUR.values():
            linear = [(int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]
            seen.append([max(0.0, sum(m * v for m, v in zip(row, linear, strict=True))) ** (1 / 2.2) for row in matrix])
        distances = [
            sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
            for at, one in enumerate(seen)
            for other in seen[:at]
        ]
        assert min(distances) > 0.1


def test_variables_and_links_lead_from_board_to_board() -> None:
    handoff, request, live = (BOARDS[f"kvtrace-{name}"] for name in ("handoff", "request", "live"))
    variables = {uid: {v["name"] for v in board["templating"]["list"]} for uid, board in BOARDS.items()}

    assert variables["kvtrace-handoff"] >= {"run", "model", "prefill", "decode", "mode"}
    assert variables["kvtrace-live"] >= {"run", "model", "prefill", "decode", "connector"}
    # A link hands on what two boards both have: Hand-off knows no "All" of scopes, so the one of Live is another.
    assert "ttft_scope" in variables["kvtrace-live"] - variables["kvtrace-handoff"]
    assert variables["kvtrace-request"] >= {"run", "request", "attempt"}
    for board in (handoff, request, live):
        (link,) = board["links"]
        assert (link["type"], link["keepTime"], link["includeVars"]) == ("dashboards", True, True)
        assert set(link["tags"]) <= set(board["tags"])
    urls = re.findall(r'"url": "(/d/[^"]+)"', json.dumps(handoff))
    assert any("kvtrace-request" in url for url in urls)
    for url in urls:
        uid = url.split("/")[2]
        assert set(re.findall(r"var-(\w+)=", url)) <= variables[uid]
        assert "${__url_time_range}" in url or "from=" in url
        assert "request_id}" not in url, "an id must be encoded"


def test_expressions_over_times_to_first_token_choose_a_scope() -> None:
    """Scopes do not compare, so none is taken together with another unless the user says so."""
    expressions = [target["expr"] for _, _, target in TARGETS if "expr" in target]
    scoped = [one for one in expressions if re.search(r"kvtrace_ttft_\w+", one)]

    assert len(scoped) > 10
    for expression in scoped:
        for selector in re.findall(r"kvtrace_ttft_\w+\{([^}]*)\}", expression):
            assert 'scope=~"$ttft_scope"' in selector


def test_what_is_divided_by_a_count_of_requests_is_of_the_same_requests() -> None:
    """Causes have no label for P and D, so a choice of those must not narrow what they are divided by."""
    (causes,) = (panel for _, panel in PANELS if panel["title"] == "Costliest causes")
    selectors = re.findall(r"\{([^{}]*)\}", causes["targets"][0]["expr"])

    assert len(selectors) == 2
    assert len(set(selectors)) == 1


def test_a_panel_names_its_source_by_variable_only() -> None:
    for uid, panel, target in TARGETS:
        variables = {variable["name"] for variable in BOARDS[uid]["templating"]["list"]}

        assert target["datasource"] == panel["datasource"], panel["title"]
        assert re.fullmatch(r"\$\{(\w+)\}", target["datasource"]["uid"]), panel["title"]
        assert target["datasource"]["uid"][2:-1] in variables, panel["title"]
        text = target.get("rawSql", target.get("expr", ""))
        used = set(re.findall(r"\$\{(\w+)", text)) | set(re.findall(r"\$([a-z]\w*)", text))
        assert used <= variables | {"__from", "__to", "__interval_ms"}, panel["title"]
        if target["datasource"]["type"] == DUCKDB:
            assert target["format"] == (3 if panel["type"] == "traces" else 1), panel["title"]


def test_every_query_is_on_a_panel_or_said_not_to_be() -> None:
    """`engines` and `processes` are inventories, the run's facts stand in every export."""
    sql = " ".join(target.get("rawSql", "") for _, _, target in TARGETS)
    shown = {query.name for query in queries.load_all() if panel_sql(query.name) in sql}

    assert {query.name for query in queries.load_all()} - shown == {"engines", "processes", "run_facts"}


def test_every_parameter_of_a_query_has_its_variable() -> None:
    assert {p.name for query in queries.load_all() for p in query.parameters} <= BINDINGS.keys()
    with pytest.raises(QueryError, match="has no column nonsense"):
        panel_sql("causes", ["nonsense"])


# Metrics and alerts ------------------------------------------------------------------------------------


def test_metrics_follow_prometheus_conventions() -> None:
    for metric in names.METRICS:
        assert re.fullmatch(r"kvtrace_[a-z_]+", metric.name)
        assert (metric.kind is names.Kind.COUNTER) == metric.name.endswith("_total")
        assert metric.unit in ("", "seconds", "bytes")
        if metric.unit:
            assert f"_{metric.unit}" in metric.name
        assert (metric.kind is names.Kind.HISTOGRAM) == bool(metric.buckets)
        assert sorted(metric.buckets) == list(metric.buckets)
        assert metric.doc.endswith(".")
        assert set(metric.labels) <= names.LABELS.keys()
        assert not {"request", "request_id", "le"} & set(metric.labels)
    assert len(names.BY_NAME) == len(names.METRICS)


def test_expressions_and_alerts_use_metrics_and_labels_that_exist() -> None:
    known = known_series()
    live = [target["expr"] for _, _, target in TARGETS if "expr" in target]
    for expression in [*live, *(alert.expression for alert in alerts.ALERTS)]:
        assert metrics_in(expression)
        for name, matchers in re.findall(r"\b(kvtrace_\w+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)=~?", matchers))
            assert used <= {*known[name].labels, *names.COMMON}, expression
        assert metrics_in(expression) <= known.keys()


def test_every_metric_is_shown_or_alerted_on() -> None:
    text = json.dumps(BOARDS["kvtrace-live"]) + alerts.rules()
    unused = {metric.name for metric in names.METRICS if metric.name not in text}

    assert unused == {
        names.LATENESS.name,
        names.LEASES.name,
        names.STEPS.name,
        names.SKIPPED.name,
        names.SPANS.name,
        names.SPOOL.name,
        names.STATE.name,
    }


# The command -------------------------------------------------------------------------------------------


def test_write_puts_everything_in_place_and_check_notices_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "grafana"

    assert cli.main(["dashboards", "write", str(folder)]) == 0
    assert {line.removeprefix(f"{folder}/") for line in capsys.readouterr().out.split()} == set(files.files())
    assert cli.main(["dashboards", "write", str(folder), "--check"]) == 0
    (folder / "boards" / "kvtrace_live.json").write_text("{}")
    (folder / "prometheus.yaml").unlink()
    assert cli.main(["dashboards", "write", str(folder), "--check"]) == 1
    said = capsys.readouterr().err
    assert "kvtrace_live.json" in said
    assert "prometheus.yaml" in said
    assert "kvtrace_handoff.json" not in said


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    assert cli.main(["dashboards", "write", str(tmp_path / "file")]) == 1
    assert f"{tmp_path}/file" in capsys.readouterr().err


def test_a_request_that_its_client_left_is_shown_and_is_no_failure() -> None:
    """What is shown as failed is what is shown as 0 from the start; alerts are about no more than that."""
    (panel,) = (panel for _, panel in PANELS if panel["title"] == "What went wrong")
    counted = {one["legendFormat"]: verdicts_in(one["expr"]) for one in panel["targets"]}

    assert counted["requests failed"] == set(ALARMING)
    assert counted["requests aborted"] == {ABORTED}
    assert set().union(*(verdicts_in(alert.expression) for alert in alerts.ALERTS)) == set(ALARMING)
