"""Other tools' numbers for one request, from traces that a reader can add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtrace import cli
from kvtrace.analyze import analyze, points
from kvtrace.reconcile import SPANS, reconcile
from kvtrace.store import Store
from tests.test_analyze import fill
from tests.trace import MS, P_API, P, Trace, pull, push


def reconciled_ms(path: Path, trace: Trace) -> dict[tuple[str, str], float | None]:
    """Return the spans of the trace's first request."""
    path.mkdir(exist_ok=True)
    with Store.open(path / "run.duckdb", "write") as store:
        fill(store, trace)
        analyze(store)
        row = store.rows("SELECT * FROM request ORDER BY start_ns")[0]
        lines = reconcile(points(store, row), row["mode"])
    return {(line.tool, line.name): None if line.duration_ns is None else line.duration_ns / MS for line in lines}


def test_pull_in_everybodys_words(tmp_path: Path) -> None:
    """Of 60 ms: llm-d's true_ttft ends when D's leg is sent, at 34; Dynamo's estimate begins at P's reply, at 33."""
    assert reconciled_ms(tmp_path, pull()) == {
        ("vLLM on P", "time to first token"): 30,
        ("vLLM on P", "queue time"): 1,
        ("vLLM on P", "prefill time"): 27,
        ("vLLM on D", "time to first token"): 22,
        ("vLLM on D", "queue time"): 10,
        ("vLLM on D", "prefill time"): 8,
        ("NIXL", "transfer time"): 4,
        ("NIXL", "post time"): 1,
        ("llm-d", "prefill_duration"): 32,
        ("llm-d", "true_ttft"): 34,
        ("llm-d", "coordinator_overhead"): 1,
        ("llm-d", "decode_duration"): 61,
        ("Dynamo", "kv_transfer_estimated_latency"): 27,
        ("Dynamo", "time to first token"): 60,
    }


def test_push_has_no_overhead_between_its_legs(tmp_path: Path) -> None:
    """D's queue time holds all of P's computing; NIXL's transfer ends with P's poll at 43, though D knew at 42."""
    found = reconciled_ms(tmp_path, push())

    assert not any(tool == "llm-d" for tool, _ in found)
    assert found["vLLM on D", "queue time"] == 43
    assert found["NIXL", "transfer time"] == 7
    assert found["Dynamo", "time to first token"] == 60


def test_only_the_asked_requests_points_count(tmp_path: Path) -> None:
    """A second hand-off a second later, 40 ms slower on the wire, changes nothing for the first."""
    trace = pull()
    trace.events += pull("r2").shifted(42, 40).later(1_000).events

    assert reconciled_ms(tmp_path, trace)["NIXL", "transfer time"] == 4


def test_a_leg_of_another_id_is_found_by_what_links_it(tmp_path: Path) -> None:
    """Behind a router of somebody else's, P's leg has an id of its own, which D's leg names: P's spans are the same."""
    tidy = pull()
    tidy.events = [event for event in tidy.events if not event.stage.startswith("router.")]
    other = Trace()
    other.events = [
        event._replace(
            request=event.request.replace("r1", "elsewhere") if event.process in (P, P_API) else event.request,
            ref=event.ref.replace("cmpl-r1-0-aaaaaaaa", "cmpl-elsewhere-0-aaaaaaaa"),
        )
        for event in tidy.events
    ]
    expected, found = reconciled_ms(tmp_path / "tidy", tidy), reconciled_ms(tmp_path / "other", other)

    assert found == expected
    assert found["vLLM on P", "prefill time"] == 27


def test_what_was_not_recorded_is_not_guessed(tmp_path: Path) -> None:
    """Without the router its spans are unknown."""
    trace = pull()
    trace.events = [event for event in trace.events if not event.stage.startswith("router.")]
    found = reconciled_ms(tmp_path, trace)

    assert found["llm-d", "true_ttft"] is found["Dynamo", "time to first token"] is None
    assert found["vLLM on D", "queue time"] == 10


def test_every_span_reaches_the_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.duckdb"
    with Store.open(path, "write") as store:
        fill(store, pull())
        analyze(store)

    assert cli.main(["explain", str(path), "r1", "--reconcile", "--json"]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    assert [(line["tool"], line["name"]) for line in request["reconcile"]] == [(s.tool, s.name) for s in SPANS]
    assert cli.main(["explain", str(path), "r1", "--reconcile"]) == 0
    out = capsys.readouterr().out
    assert all(span.name in out for span in SPANS)
    assert cli.main(["explain", str(path), "--reconcile"]) == 1
