"""Named queries about one request, as triples: a store with small round numbers, a query, the rows it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtrace import queries
from kvtrace.store import Store
from tests.asked import ask
from tests.sample_store import MS, PUSH_PATH, START_NS, Sample, scaled
from tests.test_queries_over_time import write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def test_a_request_is_found_by_either_id_and_its_last_attempt_is_meant(path: Path) -> None:
    sample = Sample()
    sample.add("r1", scaled(3), client_request_id="theirs")
    sample.add("r1", PUSH_PATH, client_request_id="theirs", attempt=1, start_ms=1000)
    sample.write(path)

    assert [r["ttft_ns"] for r in ask(path, "request_summary", request="theirs")] == [100 * MS]
    assert [r["ttft_ns"] for r in ask(path, "request_summary", request="r1", attempt=0)] == [300 * MS]
    assert ask(path, "request_summary", request="r") == []


def test_a_request_that_may_still_get_its_first_token_is_under_way(path: Path) -> None:
    sample = Sample(facts={"recorder.state": "recording"})
    sample.add("r1", ())
    sample.write(path)

    assert [row["verdict"] for row in ask(path, "request_summary", request="r1")] == ["under way"]
    assert ask(path, "request_spans", request="r1")[0]["operationName"] == "request (push, under way)"


def test_the_path_of_a_request_tiles_its_ttft_in_ns(path: Path) -> None:
    write(path)

    rows = ask(path, "request_path", request="r1")
    (whole,) = ask(path, "request_summary", request="r1")

    ends = [row["offset_ns"] + row["duration_ns"] for row in rows]
    assert [row["offset_ns"] for row in rows] == [0, *ends[:-1]]
    assert ends[-1] == whole["ttft_ns"] == 100 * MS
    assert rows[5] == {
        "position": 5, "where": "prefill", "cause": "prefill.forward", "class": "compute.run", "offset_ns": 20 * MS,
        "duration_ns": 30 * MS, "share": 0.3, "waited_for": "", "crosses_hosts": False,
    }  # fmt: skip


def test_what_is_hidden_and_who_is_blamed_for_a_request(path: Path) -> None:
    write(path)

    hidden = ask(path, "request_hidden", request="r1")
    assert [(r["cause"], r["offset_ns"], r["duration_ns"], r["slack_ns"]) for r in hidden] == [
        ("registration", 5 * MS, 8 * MS, 40 * MS),
        ("sender.poll", 66 * MS, 6 * MS, 28 * MS),
    ]
    assert ask(path, "request_blame", request="r2") == [{"blamed_request_id": "r1", "extension_ns": 15 * MS}]


def test_spans_hang_together_and_last_as_long_as_the_path(path: Path) -> None:
    write(path)

    rows = ask(path, "request_spans", request="r1")
    by_id = {row["spanID"]: row for row in rows}

    assert rows[0]["spanID"] == "request"
    assert len(by_id) == len(rows) == 3 + len(PUSH_PATH) + 2
    assert len({row["traceID"] for row in rows}) == 1
    assert {row["parentSpanID"] for row in rows[1:]} <= by_id.keys()
    on_path = [row for row in rows if row["parentSpanID"] == "path"]
    assert sum(row["duration"] for row in on_path) == pytest.approx(by_id["path"]["duration"]) == 100.0
    assert by_id["path-5"]["operationName"] == "prefill.forward (compute.run)"
    assert by_id["path-5"]["serviceName"] == "P p0"
    assert by_id["path-5"]["startTime"] == pytest.approx(START_NS / 1e6 + 20, abs=1e-3)
    assert by_id["hidden-1"]["operationName"] == "registration (hidden)"


def test_profiles_of_a_request_are_asked_for_by_engine_and_time(path: Path) -> None:
    """P's and D's, from 10 s before it began to its end, where a server has them; else nobody's, as the title says."""
    write(path)
    profiled = path.with_name("profiled.duckdb")
    write(profiled)
    with Store.open(profiled, "write") as store:
        store.remember({"profiles": "on", "profiles.url": "http://pyroscope:4040"})

    assert ask(path, "request_profiles", request="r1") == []
    assert "--profile-dir" in queries.load("request_profiles").title
    times = {"application": "kvtrace", "from_ms": START_NS // MS - 10_000, "to_ms": START_NS // MS + 301}
    assert ask(profiled, "request_profiles", request="r1") == [
        {"side": "prefill", "engine": "p0", **times},
        {"side": "decode", "engine": "d0", **times},
    ]


def test_a_request_without_a_first_token_is_one_span(path: Path) -> None:
    write(path)

    (row,) = ask(path, "request_spans", request="r4")

    assert (row["operationName"], row["duration"], row["parentSpanID"]) == ("request (push, failed)", 0.0, "")
    assert ask(path, "request_path", request="r4") == []
