"""Prometheus takes the rules and the configuration, and every expression of the board Live returns data from it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvtrace.dashboards import files
from kvtrace.dashboards.alerts import ALERTS
from kvtrace.metrics import names
from tests.dashboards import tools
from tests.dashboards.endpoint import Shown
from tests.dashboards.exposition import exposed, text
from tests.dashboards.scraping import prometheus, samples
from tests.dashboards.test_rendering import BOARDS, PICTURES, draw, panels_of

pytestmark = pytest.mark.dashboards

LIVE = "kvtrace-live"


def run(*command: str | Path, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    files.write(tmp_path)
    configuration = (tmp_path / "prometheus.yaml").read_text()
    (tmp_path / "local.yaml").write_text(configuration.replace("/etc/prometheus/", f"{tmp_path}/"))

    assert f"{len(ALERTS)} rules found" in run(tools.promtool(), "check", "rules", tmp_path / "kvtrace_alerts.yaml")
    assert "SUCCESS" in run(tools.promtool(), "check", "config", tmp_path / "local.yaml")


def test_promtool_finds_nothing_against_the_metrics() -> None:
    """Names, units, types and help as Prometheus's conventions have them."""
    assert run(tools.promtool(), "check", "metrics", given=text(10.0)).strip() == ""


# For each alert: a series as it is when something is wrong, and as it is when nothing is.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "KvtraceLeasesExpire": (
        {'kvtrace_leases_expired_total{run="r",engine="p0"}': "0 0 1+1x60"},
        {'kvtrace_leases_expired_total{run="r",engine="p0"}': "7+0x60"},
    ),
    "KvtraceTransfersFail": (
        {'kvtrace_transfers_total{run="r",engine="p0",outcome="failed"}': "0+1x60"},
        {
            'kvtrace_transfers_total{run="r",engine="p0",outcome="failed"}': "3+0x60",
            'kvtrace_transfers_total{run="r",engine="p0",outcome="done"}': "0+9x60",
        },
    ),
    "KvtraceRequestsFail": (
        {
            'kvtrace_requests_total{run="r",verdict="complete"}': "0+90x60",
            'kvtrace_requests_total{run="r",verdict="failed"}': "0+10x60",
        },
        {
            'kvtrace_requests_total{run="r",verdict="complete"}': "0+1000x60",
            'kvtrace_requests_total{run="r",verdict="failed"}': "0+1x60",
        },
    ),
    "KvtraceBlocksCorrupt": (
        {'kvtrace_requests_total{run="r",verdict="corrupt"}': "0+1x60"},
        {'kvtrace_requests_total{run="r",verdict="corrupt"}': "2+0x60"},
    ),
    "KvtraceCoordinationHigh": (
        {  # of both scopes together it would be 16 of 110
            'kvtrace_ttft_class_seconds_sum{run="r",mode="push",scope="router",class="coordination"}': "0+6x60",
            'kvtrace_ttft_seconds_sum{run="r",mode="push",scope="router"}': "0+10x60",
            'kvtrace_ttft_class_seconds_sum{run="r",mode="push",scope="engine",class="coordination"}': "0+10x60",
            'kvtrace_ttft_seconds_sum{run="r",mode="push",scope="engine"}': "0+100x60",
        },
        {
            'kvtrace_ttft_class_seconds_sum{run="r",mode="push",scope="router",class="coordination"}': "0+4x60",
            'kvtrace_ttft_seconds_sum{run="r",mode="push",scope="router"}': "0+10x60",
        },
    ),
    "KvtraceSaturated": (
        {'kvtrace_arrivals_total{run="r"}': "0+8x60", 'kvtrace_requests_total{run="r",verdict="complete"}': "0+5x60"},
        {'kvtrace_arrivals_total{run="r"}': "0+8x60", 'kvtrace_requests_total{run="r",verdict="complete"}': "0+8x60"},
    ),
    "KvtraceRecordsLost": (
        {'kvtrace_lost_records_total{run="r",kind="core"}': "0+5x60"},
        {'kvtrace_lost_records_total{run="r",kind="core"}': "5+0x60"},
    ),
    "KvtraceSilenced": (
        {'kvtrace_silenced_processes{run="r",kind="core"}': "1+0x60"},
        {'kvtrace_silenced_processes{run="r",kind="core"}': "0+0x60"},
    ),
    "KvtraceRecorderLate": (
        {'kvtrace_recorder_lag_seconds{run="r"}': "30+0x60"},
        {'kvtrace_recorder_lag_seconds{run="r"}': "1+0x60"},
    ),
}


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert CASES.keys() == {alert.name for alert in ALERTS}
    files.write(tmp_path)
    cases = []
    for name, (wrong, right) in CASES.items():
        alert = next(alert for alert in ALERTS if alert.name == name)
        for series, fires in ((wrong, True), (right, False)):
            labels = {"severity": alert.severity}
            for label in ("run", "engine", "kind", "mode", "scope"):
                if found := re.search(rf'\b{label}="(\w+)"', next(iter(series))):
                    labels |= {label: found[1]} if f"{label}" in alert.expression.split(")")[0] else {}
            expected = [{"exp_labels": labels, "exp_annotations": annotations(alert, labels)}] if fires else []
            cases.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": key, "values": values} for key, values in series.items()],
                    "alert_rule_test": [{"eval_time": "40m", "alertname": name, "exp_alerts": expected}],
                }
            )
    (tmp_path / "cases.json").write_text(json.dumps({"rule_files": ["kvtrace_alerts.yaml"], "tests": cases}))

    assert "SUCCESS" in run(tools.promtool(), "test", "rules", tmp_path / "cases.json")


def annotations(alert: Any, labels: dict[str, str]) -> dict[str, str]:
    def put_in(words: str) -> str:
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], words)

    return {"summary": put_in(alert.summary), "description": put_in(alert.step)}


# A real Prometheus --------------------------------------------------------------------------------------


def frames(address: str, query: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what Grafana's Prometheus data source makes of a target: one frame for each series."""
    target, expression = query["target"], query["text"]
    end_s = time.time()
    span = {} if target["instant"] else {"start": end_s - 30, "end": end_s, "step": 1}
    made = []
    for series in samples(address, expression, **span):
        points = [series["value"]] if "value" in series else series["values"]
        legend = re.sub(r"\{\{(\w+)\}\}", lambda m, of=series["metric"]: of.get(m[1], ""), target["legendFormat"])
        made.append(
            {
                "fields": [
                    {"name": "Time", "type": "time", "values": [round(at * 1000) for at, _ in points]},
                    {"name": legend, "type": "number", "values": [float(value) for _, value in points]},
                ],
            }
        )
    return made


def test_live_is_drawn_from_a_real_prometheus(tmp_path: Path, chromium: str) -> None:
    """Every expression returns data, and 1,000 observations more add no series."""
    board = BOARDS[LIVE]
    asked: dict[str, int] = {}
    with exposed() as port, prometheus(tmp_path, port) as address:
        before = int(samples(address, 'count({__name__=~"kvtrace_.*"})')[0]["value"][1])

        def answer(query: Any) -> list[dict[str, Any]]:
            found = frames(address, query)
            asked[query["text"]] = len(found)
            return found

        now_ms = round(time.time() * 1000)
        shown = opened_live(board, address, now_ms)
        drawing = draw(chromium, shown, answer, PICTURES / f"{LIVE}.png", len(panels_of(LIVE)))
        after = int(samples(address, 'count({__name__=~"kvtrace_.*"})')[0]["value"][1])

    assert drawing.failures == []
    assert [title for title, state in drawing.drawn.items() if state["empty"]] == []
    assert [text for text, series in asked.items() if series == 0] == []
    assert len(asked) == len({target["expr"] for panel in panels_of(LIVE) for target in panel["targets"]})
    assert before == after
    # All observations lie in the bucket from 50 to 100 ms, within which Prometheus takes them to be spread evenly.
    assert re.search(r"p50 push\n75(\.0)? ms", drawing.texts["Percentiles"])
    assert re.search(r"p99 push\n99\.5 ms", drawing.texts["Percentiles"])


def opened_live(board: Any, address: str, now_ms: int) -> Any:
    """Return the board opened over the last half minute, its variables listed by Prometheus."""
    choices: dict[str, dict[str, Any]] = {}
    for variable in board["templating"]["list"]:
        options = ["kvtrace"]
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            options = sorted({series["metric"][label] for series in samples(address, metric)})
            assert options, variable["name"]
        choices[variable["name"]] = {
            "value": "$__all" if variable["type"] == "query" else "kvtrace",
            "options": options,
        }
    return Shown(board, now_ms - 30_000, now_ms, choices)


def test_metrics_of_the_stand_in_are_those_declared() -> None:
    told = set(re.findall(r"^# TYPE (\w+) ", text(1.0), re.MULTILINE))

    assert told == set(names.BY_NAME)
