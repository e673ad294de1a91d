"""A recording that is read while it goes on: `kvtrace explain`, the panels, Grafana's copy and Prometheus at once.

A real lab under load and a small fleet (1,000 distinct requests and more, some 2,000 events a second, its events
emitted straight into a spool) are recorded by a `kvtrace record` with --metrics and --grafana-copy. Meanwhile, each in
a process of its own, again and again: `kvtrace explain`; the SQL of every panel in DuckDB 2; the same in DuckDB 1.5 on
Grafana's copy, opened read-write and kept open as the plug-in does. A real Prometheus scrapes every second.

The load lasts KVTRACE_LIVE_SECONDS, 9 unless it is set. For two minutes, with the figures shown:

    KVTRACE_LIVE_SECONDS=120 pytest -s tests/engine/test_live.py
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtrace.dashboards import files
from kvtrace.lab import workload
from kvtrace.lab.stack import Lab
from kvtrace.metrics import names
from kvtrace.stages import CAUSES, Class
from kvtrace.testing import Fleet
from kvtrace.verdict import VERDICTS
from tests.dashboards import tools
from tests.dashboards.grafana import promql
from tests.dashboards.scraping import label_values, prometheus, samples
from tests.engine import programs
from tests.engine.audience import Ages, explaining, looking, panels_sql, reading
from tests.engine.conftest import Deployments
from tests.live_fleet import emitting
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),
    pytest.mark.parametrize("mode", ["push"], scope="module"),
]

SECONDS = float(os.environ.get("KVTRACE_LIVE_SECONDS", "9"))
FLEET_QPS = max(60.0, 1050 / SECONDS)
"""60 of them make, with their steps and the lab's requests, some 2,000 events a second; it has to be 1,000 at least."""
MORE = 500
"""Requests behind the load, of which Prometheus must not have more series."""
LAB_QPS = 2.0
LAB = {"input_len": 200, "output_len": 8, "seed": 31, "quiet": True}
SEEN_S = 60.0
"""How long the last request may take until every reader sees it, the machine being as busy as it is."""
AGE_S, SHARE = 5.0, 0.1
RATE_INTERVAL_S = 20
"""Grafana's, at the 5 s between scrapes that the provisioned data source has."""
ALL_SERIES = '{__name__=~"kvtrace_.*"}'
(LIVE,) = (board.to_json() for board in files.boards() if board.uid == "kvtrace-live")


# The recording --------------------------------------------------------------------------------------------


@dataclass
class Observed:
    """What everybody saw of one recording."""

    sent: frozenset[str]
    readings: dict[str, list[dict[str, Any]]]
    answers: dict[str, dict[str, list[dict[str, Any]]]]
    """By whose requests were asked for, by expression: what Prometheus had."""
    series: tuple[tuple[int, int], ...]
    """How many requests were over and how many series there were: behind the load, and behind `MORE` requests."""
    labels: dict[str, list[str]]
    ages: Ages
    """Of the newest event and request in the snapshot under load."""
    publishing_share: float
    events_per_s: float
    log: str


@pytest.fixture(scope="module")
def observed(deployments: Deployments, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    tools.prometheus()
    deployment = deployments.get(mode)
    seen = observe(deployment.lab, deployment.spool, tmp_path_factory.mktemp("live"))
    sys.stdout.write("\n" + figures(seen) + "\n")
    return seen


def observe(lab: Lab, lab_spool: Path, folder: Path) -> Observed:
    """Record the lab and the fleet under load while everybody reads; return what they saw."""
    store, copy, spool = folder / "run.duckdb", folder / "grafana" / "run.duckdb", folder / "spool"
    later = folder / "later"
    for needed in (copy.parent, spool, later):
        needed.mkdir()
    since_ns = time.time_ns()
    fleet = Fleet(round(FLEET_QPS * SECONDS), seed=17, per_s=FLEET_QPS, pairs=1)
    options = ("--spool", spool, "--metrics", "0", "--grafana-copy", copy)
    with ExitStack() as readers, ExitStack() as stack:  # who reads ends last, and reads once more
        stack.enter_context(programs.following(store, lab_spool, *options))
        emitted = stack.enter_context(emitting(fleet, folder, spool))
        load = stack.enter_context(ThreadPoolExecutor(1)).submit(
            workload.run, lab.url, requests=round(SECONDS * LAB_QPS), rate_qps=LAB_QPS, **LAB
        )
        sql = panels_sql(since_ns, since_ns + int((SECONDS + SEEN_S) * 1e9), min(emitted.request_ids))
        given = {"asked": sql, "since_ns": since_ns}
        panels = readers.enter_context(reading(sys.executable, "store", store, **given))
        plug_in = readers.enter_context(reading(tools.old_duckdb_python(), "copy", copy, **given))
        address = stack.enter_context(prometheus(folder, metrics_port(store), scrapes=1))
        began = spent(address)
        with looking(store) as ages:
            until(lambda: over(address) > 0, SEEN_S, "a request is over")
            explained = readers.enter_context(explaining(store))
            emitted.wait(SECONDS + SEEN_S)
        ended = spent(address)
        records = load.result(timeout=SEEN_S).records
        assert [record.error for record in records if record.error] == []
        sent = emitted.request_ids | {record.client_request_id for record in records}
        until(lambda: over(address) >= len(sent), SEEN_S, "Prometheus has counted everything")
        few = count_series(address)
        with emitting(Fleet(MORE, seed=18, per_s=MORE, pairs=1), later, spool) as more:
            more.wait(SEEN_S)
        sent |= more.request_ids
        until(lambda: over(address) >= len(sent), SEEN_S, "Prometheus has counted what came behind the load")
        many = count_series(address)
        p, d = (engine.engine_id for engine in lab.engines)
        answers = {"all": live_answers(address), "the lab": live_answers(address, prefill=p, decode=d)}
        for reader in (panels, plug_in):
            until(lambda one=reader: one.has_seen(len(sent)), SEEN_S, "a reader sees everything")
        until(lambda: explained.has_seen(sent), SEEN_S, "explain shows everything")
        labels = label_values(address, ALL_SERIES)
        readers.callback(lambda: [reader.process.terminate() for reader in (panels, plug_in)])
    readings = {"explain": explained.lines, "panels": panels.lines, "copy": plug_in.lines}
    share, rate = ((late - early) / (ended[0] - began[0]) for early, late in zip(began[1:], ended[1:], strict=True))
    return Observed(
        sent, readings, answers, (few, many), labels, ages, share, rate, store.with_suffix(".log").read_text()
    )


def metrics_port(store: Path) -> int:
    """Return where the recorder shows its metrics, as it says itself."""
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", store.with_suffix(".log").read_text())
    assert found
    return int(found[1])


def spent(address: str) -> tuple[float, float, float]:
    """Return the time, s, the processor time spent on publishing by then, s, and how many events had been taken in."""
    found = [samples(address, name)[0]["value"] for name in (names.PUBLISHING.name, names.EVENTS.name)]
    return float(found[0][0]), *(float(value) for _, value in found)


def over(address: str) -> int:
    """Return how many requests are over, as Prometheus knows."""
    found = samples(address, f"sum({names.REQUESTS.name})")
    return int(found[0]["value"][1]) if found else 0


def count_series(address: str) -> tuple[int, int]:
    """Return how many requests are over, and how many series there are."""
    return over(address), int(samples(address, f"count({ALL_SERIES})")[0]["value"][1])


def live_answers(address: str, **chosen: str) -> dict[str, list[dict[str, Any]]]:
    """Return what Prometheus has for each expression of the board Live over the last seconds; other choices are All."""
    end_s = time.time()
    expressions = {t["expr"] for panel in LIVE["panels"] for t in panel.get("targets", ())}
    return {
        one: samples(
            address,
            promql(LIVE, one, RATE_INTERVAL_S, round(SECONDS), **chosen),
            start=end_s - RATE_INTERVAL_S,
            end=end_s,
            step=1,
        )
        for one in sorted(expressions)
    }


def figures(seen: Observed) -> str:
    """Return what was measured, as text."""
    counts = {
        name: (len(lines), len({line["published_ns"] for line in lines})) for name, lines in seen.readings.items()
    }
    return "\n".join(
        [
            f"{seen.events_per_s:,.0f} events/s, {len(seen.sent):,} requests in {SECONDS:.0f} s",
            *(
                f"  newest {what} in the snapshot: {statistics.median(ages_s):.2f} s old in the median, "
                f"{max(ages_s):.2f} s at most; older than {AGE_S} s at "
                f"{sum(age > AGE_S for age in ages_s)} of {len(ages_s)} looks"
                for what, ages_s in (("event", seen.ages.event_s), ("request", seen.ages.request_s))
            ),
            f"  publishing: {seen.publishing_share:.1%} of a core",
            "  series: " + ", ".join(f"{count} after {requests}" for requests, count in seen.series),
            *(f"  {name}: {reads} readings of {snapshots} snapshots" for name, (reads, snapshots) in counts.items()),
        ]
    )


# What must hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["explain", "panels", "copy"])
def test_a_reader_meets_whole_snapshots_each_as_new_as_the_one_before(observed: Observed, reader: str) -> None:
    """No error, nothing that lacks a part, nothing older than what was read before, in the end all that was sent."""
    lines = observed.readings[reader]

    assert len({line["published_ns"] for line in lines}) >= 2 + SECONDS // 20
    for earlier, later in itertools.pairwise(lines):
        for name in ("published_ns", "events", "requests", "newest_ns"):
            assert earlier[name] <= later[name], (name, earlier, later)
    assert [line for line in lines if line.get("untiled") or line.get("homeless")] == []
    assert [line for line in lines if not line.get("same", True)] == []
    assert lines[-1]["state"] == "complete"
    assert observed.sent <= set(re.findall(r"kvt-[0-9a-f]{32}|load-[0-9a-f]+-\d+", "\n".join(lines[-1]["ids"])))


def test_a_log_that_the_plug_in_left_belongs_to_no_later_snapshot(observed: Observed) -> None:
    lines = observed.readings["copy"]

    assert any(line.get("left") for line in lines)
    assert [line for line in lines if line["left_ns"] != line["published_ns"]] == []


def test_both_duckdbs_have_as_many_rows_in_every_panel(observed: Observed) -> None:
    panels, copy = (observed.readings[name][-1]["rows"] for name in ("panels", "copy"))

    assert panels == copy
    assert sum(map(bool, panels)) > 30


@pytest.mark.parametrize("whose", ["all", "the lab"])
def test_every_expression_of_live_returns_data(observed: Observed, whose: str) -> None:
    """Of the lab alone too, where nothing went wrong: what has not happened is zero, and not missing."""
    answers = observed.answers[whose]

    assert len(answers) > 30
    assert [expression for expression, found in answers.items() if not any(map(is_data, found))] == []


def is_data(series: dict[str, Any]) -> bool:
    """Return whether a series has a number: the quantile of nothing is none."""
    return any(value not in {"NaN", "+Inf", "-Inf"} for _, value in series["values"])


def test_series_are_bounded_over_a_thousand_requests(observed: Observed) -> None:
    """Labels hold engines and words of the vocabulary, so many times the requests make only a few more series."""
    (few, before), (many, after) = observed.series
    own = {"__name__", "instance", "job", "le", "run", "model", "connector", "prefill", "decode", "engine"}
    known = {
        "mode": {"push", "pull", "local", "unknown", ""}, "scope": {"client", "router", "engine", ""},
        "verdict": set(VERDICTS), "class": {kind.value for kind in Class}, "cause": {cause.name for cause in CAUSES},
        "outcome": {*names.OUTCOMES, "in_time", "late"}, "kind": {"router", "api", "core", "worker"},
        "state": {"recording", "failing", "complete"},
    }  # fmt: skip

    assert few >= 1000
    assert many - few >= MORE
    assert after <= 1.1 * before, observed.series
    assert observed.labels.keys() <= own | known.keys()
    for label, allowed in known.items():
        assert set(observed.labels.get(label, ())) <= allowed, label
    for label in ("prefill", "decode", "engine", "run", "model", "connector"):
        assert len(observed.labels[label]) <= 6, observed.labels[label]
    assert not re.search("kvt-|load-", json.dumps(observed.labels))


def test_snapshots_are_young_and_cheap(observed: Observed) -> None:
    """For less than a tenth of a core; half of the time within twice the aim, since engines share the two cores."""
    assert statistics.median(observed.ages.event_s) < 2 * AGE_S
    assert observed.publishing_share < SHARE
    assert "failed" not in observed.log
