"""Named queries that count a second's requests: offered, served in time, failed, by verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtrace.store import Store
from tests.asked import ask, leave
from tests.sample_store import MS, PUSH_PATH, START_NS, Sample
from tests.test_queries_over_time import BUCKET, PULL, SECOND_NS, second, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def test_goodput_counts_what_met_both_targets(path: Path) -> None:
    """Of three pushes, one of them without answer, only r1 has its first token by 150 ms and tokens every 20 ms."""
    write(path)

    (pull, push) = ask(path, "goodput", ttft_target_ms=150, tpot_target_ms=20)

    assert (push["requests"], push["answered"], push["good"], push["good_share"]) == (3, 2, 1, pytest.approx(1 / 3))
    assert (push["ttft_mean_ms"], push["ttft_p50_ms"], push["tpot_p50_ms"]) == (150.0, 150.0, 20.0)
    assert push["offered_per_s"] == pytest.approx(3 / 2.1)
    assert push["good_per_s"] == pytest.approx(1 / 2.1)
    assert (pull["good"], pull["good_share"]) == (1, 1.0)
    assert [row["good"] for row in ask(path, "goodput")] == [1, 2]
    assert [row["good"] for row in ask(path, "goodput", ttft_target_ms=100, tpot_target_ms=5)] == [1, 0]


def test_goodput_over_time(path: Path) -> None:
    write(path)

    rows = ask(path, "goodput_over_time", ttft_target_ms=150, **BUCKET)

    assert [(second(r["ts"]), r["requests"], r["answered"], r["good"], r["good_share"]) for r in rows] == [
        (0, 2, 2, 1, 0.5),
        (2, 2, 1, 1, 0.5),
    ]
    assert (rows[0]["offered_per_s"], rows[0]["good_per_s"]) == (2.0, 1.0)


def test_offered_over_time(path: Path) -> None:
    """r1 is under way when the first tenth of a second ends, r2 in the sixth, r3 in the 21st; r4 never gets a token."""
    write(path)

    rows = ask(path, "offered_over_time", **BUCKET)

    assert [(second(r["ts"]), r["arrived_per_s"], r["first_tokens_per_s"], r["ended_per_s"]) for r in rows] == [
        (0, 2.0, 2.0, 2.0),
        (2, 2.0, 1.0, 1.0),
    ]
    assert [row["in_flight"] for row in ask(path, "offered_over_time", bucket_ns=100 * MS)] == [
        1,
        0,
        0,
        1,
        0,
        0,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, [(-20, 2.0), (40, 1.0)]),
        ({"from_ns": START_NS + 32 * SECOND_NS}, [(-20, 2.0), (40, 1.0)]),
        ({"to_ns": START_NS + 35 * SECOND_NS}, [(-20, 2.0)]),
    ],
)
def test_rates_are_by_the_time_of_a_row_that_the_run_covers(
    path: Path, given: dict[str, int], told: list[tuple[int, float]]
) -> None:
    """Two requests a second from 30.5 s on, of which the last is over at 40.5 s; a minute ends at 40 s.

    The half second of the second row counts as a whole one.
    """
    sample = Sample()
    for number in range(20):
        at_ms = 30_500 + number * 500
        sample.add(f"r{number}", PUSH_PATH, start_ms=at_ms, end_ns=START_NS + (at_ms + 500) * MS)
    sample.write(path)

    rows = ask(path, "offered_over_time", **given)

    assert [(second(row["ts"]), row["arrived_per_s"]) for row in rows if row["arrived_per_s"]] == told
    assert [(second(row["ts"]), row["offered_per_s"]) for row in ask(path, "goodput_over_time", **given)] == told


def test_what_is_under_way_has_neither_ended_nor_failed(path: Path) -> None:
    """Request a has its token at 100 ms, b was given up at 300 ms, c waits since 100 ms, d was last seen long ago."""
    sample = Sample(facts={"recorder.state": "recording"})
    sample.add("d", (), start_ms=-700_000, end_ns=START_NS - 700_000 * MS)
    sample.add("a", PUSH_PATH, ())
    sample.add("b", (), start_ms=100, end_ns=START_NS + 300 * MS, verdict="failed")
    sample.add("c", (), start_ms=100, end_ns=START_NS + 150 * MS)
    sample.write(path)
    asked = {"bucket_ns": 100 * MS, "from_ns": START_NS}

    rows = ask(path, "offered_over_time", **asked)
    assert [(row["in_flight"], row["ended_per_s"]) for row in rows] == [(1, 0), (2, 0), (1, 20)]
    found = {(row["what"], row["example"]) for row in ask(path, "failures")}
    assert found == {("failed", "b"), ("incomplete", "d")}

    leave()
    with Store.open(path, "write") as store:
        store.remember({"recorder.state": "complete"})
    assert [row["in_flight"] for row in ask(path, "offered_over_time", **asked)] == [1, 1, 0]
    assert ("incomplete", 2) in {(row["what"], row["count"]) for row in ask(path, "failures")}


def test_failures_over_time(path: Path) -> None:
    """The pair with p1 goes bad in second 2; what has no hand-off has not failed, and what is under way has not yet."""
    sample = Sample(facts={"recorder.state": "recording"})
    sample.add("r1", PUSH_PATH, start_ms=100)
    sample.add("r2", PUSH_PATH, start_ms=200, **PULL)
    sample.add("r3", PUSH_PATH, start_ms=2000, verdict="no handoff", transfers=0)
    sample.add("r4", PUSH_PATH, start_ms=2100, **PULL)
    sample.add("r5", PUSH_PATH, start_ms=2300, verdict="failed", **PULL)
    sample.add("r6", PUSH_PATH, start_ms=2200, verdict="failed", **PULL)
    sample.add("r7", PUSH_PATH, start_ms=2400, verdict="expired", **PULL)
    sample.add("r8", (), start_ms=2400)
    sample.write(path)

    rows = ask(path, "failures_over_time", **BUCKET)

    assert [(second(r["ts"]), r["prefill_engine"], r["requests"], r["failed_requests"]) for r in rows] == [
        (0, "p0", 1, 0),
        (0, "p1", 1, 0),
        (2, "p0", 1, 0),
        (2, "p1", 4, 3),
    ]
    assert [(r["failed_share"], r["transfers"], r["verdict"], r["example"]) for r in rows[2:]] == [
        (0, 0, None, None),
        (0.75, 4, "failed", "r6"),
    ]
    assert ask(path, "failures_over_time", mode="pull", from_ns=START_NS + SECOND_NS, **BUCKET) == rows[3:]


def test_verdicts_over_time(path: Path) -> None:
    write(path)

    rows = ask(path, "verdicts_over_time", **BUCKET)

    assert [(second(r["ts"]), r["complete"], r["failed"], r["aborted"]) for r in rows] == [(0, 2, 0, 0), (2, 1, 1, 0)]
