"""Named queries over what `analyze` left, as triples: a store with small round numbers, a query, the rows it gives."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from tests.asked import ask
from tests.sample_store import MS, PUSH_PATH, START_NS, Sample, scaled

if TYPE_CHECKING:
    from pathlib import Path

SECOND_NS = 1_000 * MS
BUCKET = {"bucket_ns": str(SECOND_NS)}
PULL = {"mode": "pull", "prefill_engine": "p1", "registration_late_ns": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def second(at: dt.datetime) -> int:
    """Return the whole seconds from the trace's start to the time."""
    return round(at.timestamp()) - START_NS // SECOND_NS


def write(path: Path) -> None:
    """Write two pushes of 100 and 200 ms in second 0, one of 100 ms by pull and one without answer in second 2.

    The pushes' second tokens come every 10 and every 30 ms.
    """
    sample = Sample()
    sample.add("r1", PUSH_PATH, prompt_tokens=600, registration_late_ns=-20 * MS)
    sample.add("r2", scaled(2), start_ms=500, prompt_tokens=1100, registration_late_ns=40 * MS)
    sample.add("r3", PUSH_PATH, start_ms=2000, prompt_tokens=1023, **PULL)
    sample.add("r4", (), start_ms=2100, verdict="failed", prompt_tokens=600)
    sample.add_pace("r1", (("decode.token", "compute.run", 40),), (10, 10, 10, 10))
    sample.add_pace(
        "r2", (("decode.token", "compute.run", 40), ("step.connector", "coordination", 20)), (30, 30), r1=15
    )
    sample.write(path)


def test_ttft_over_time(path: Path) -> None:
    write(path)

    rows = ask(path, "ttft_over_time", **BUCKET)

    assert [(second(r["ts"]), r["scope"], r["requests"], r["ttft_p50_ms"]) for r in rows] == [
        (0, "router", 2, 150.0),
        (2, "router", 1, 100.0),
    ]
    first = rows[0]
    parts = [
        first[f"{name}_ms"] for name in ("compute_run", "compute_queue", "coordination", "transfer", "unattributed")
    ]
    assert parts == [60.0, 15.0, 58.5, 15.0, 1.5]
    assert sum(parts) == 150.0


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"mode": "pull"}, ["r3"]),
        ({"prefill": "p1"}, ["r3"]),
        ({"decode": "d1"}, []),
        ({"scope": "client"}, []),
        ({"from_ns": START_NS + SECOND_NS}, ["r3"]),
        ({"to_ns": START_NS + 500 * MS}, ["r1"]),
        ({"from_ns": START_NS + 500 * MS, "to_ns": START_NS + SECOND_NS}, ["r2"]),
    ],
)
def test_what_is_asked_for_can_be_narrowed(path: Path, given: dict[str, object], left: list[str]) -> None:
    """From is inclusive and to exclusive, so that neighbouring stretches of time share nothing."""
    write(path)

    assert [row["request_id"] for row in ask(path, "slowest_requests", **given)] == left
    assert sum(row["requests"] for row in ask(path, "ttft_by_pair", **given)) == len(left)
    assert sum(row["requests"] for row in ask(path, "ttft_by_length", **given)) == len(left)
    assert sum(row["requests"] for row in ask(path, "ttft_by_concurrency", **given)) == len(left)
    assert sum(row["requests"] for row in ask(path, "ttft_over_time", **given)) == len(left)
    assert {row["requests"] for row in ask(path, "shares_by_class", **given)} == ({len(left)} if left else set())


def test_ttft_by_length(path: Path) -> None:
    """600 and 1,023 tokens go together, 1,100 do not, and push not with pull."""
    write(path)

    rows = ask(path, "ttft_by_length")

    assert [(r["mode"], r["tokens_from"], r["tokens_to"], r["requests"], r["ttft_p50_ms"]) for r in rows] == [
        ("pull", 512, 1023, 1, 100.0),
        ("push", 512, 1023, 1, 100.0),
        ("push", 1024, 2047, 1, 200.0),
    ]
    assert rows[1]["us_per_token"] == pytest.approx(100_000 / 600)


def test_ttft_by_concurrency(path: Path) -> None:
    """r1 is over when r2 comes at 300, and r3 is not; r4, which gets no answer, stands beside r5 and r6."""
    sample = Sample()
    sample.add("r1", PUSH_PATH)
    sample.add("r2", scaled(2), start_ms=300)
    sample.add("r3", PUSH_PATH, start_ms=299, **PULL)
    sample.add("r4", (), start_ms=2000, end_ns=START_NS + 3000 * MS)
    sample.add("r5", scaled(3), start_ms=2000)
    sample.add("r6", PUSH_PATH, start_ms=2999)
    sample.add("r7", PUSH_PATH, start_ms=3300)
    sample.write(path)

    rows = ask(path, "ttft_by_concurrency")

    assert [(r["mode"], r["in_flight_from"], r["in_flight_to"], r["requests"], r["ttft_p50_ms"]) for r in rows] == [
        ("pull", 2, 3, 1, 100.0),
        ("push", 1, 1, 2, 100.0),
        ("push", 2, 3, 3, 200.0),
    ]
    assert rows[2]["compute_queue_ms"] == 20.0
    assert ask(path, "ttft_by_concurrency", mode="push") == rows[1:]
    later = ask(path, "ttft_by_concurrency", from_ns=START_NS + 300 * MS, to_ns=START_NS + 2999 * MS)
    assert [(r["in_flight_from"], r["requests"]) for r in later] == [(2, 2)]


def test_ttft_by_pair(path: Path) -> None:
    write(path)

    rows = ask(path, "ttft_by_pair")

    assert [(r["prefill_engine"], r["decode_engine"], r["mode"], r["requests"], r["ttft_p50_ms"]) for r in rows] == [
        ("p0", "d0", "push", 2, 150.0),
        ("p1", "d0", "pull", 1, 100.0),
    ]
    assert rows[0]["transfer_ms"] == 15.0


def test_scenarios_tell_late_registrations_from_those_in_time(path: Path) -> None:
    write(path)

    rows = ask(path, "scenarios")

    assert [(r["scenario"], r["requests"], r["share"], r["lateness_p50_ms"], r["ttft_p50_ms"]) for r in rows] == [
        ("in time", 1, 0.5, -20.0, 100.0),
        ("late", 1, 0.5, 40.0, 200.0),
    ]


def test_detection_spread(path: Path) -> None:
    """12 ms twice and 24 ms once: rows from 8 and from 16 ms."""
    write(path)

    assert ask(path, "detection_spread") == [
        {"from_ms": 8.0, "to_ms": 16.0, "requests": 2, "share": pytest.approx(2 / 3)},
        {"from_ms": 16.0, "to_ms": 32.0, "requests": 1, "share": pytest.approx(1 / 3)},
    ]


def test_posting_is_held_against_the_wire(path: Path) -> None:
    """4 ms posting of 10 ms transfer for r1, 8 of 20 for r2; the bracket adds 8 ms to each."""
    write(path)

    (pull, push) = ask(path, "posting")

    assert (push["requests"], push["post_p50_ms"], push["wire_p50_ms"], push["wire_high_p50_ms"]) == (2, 6.0, 9.0, 17.0)
    assert (push["post_share"], push["post_share_low"]) == (12 / 30, pytest.approx(12 / 46))
    assert (push["descriptors_p50"], push["post_us_per_descriptor"]) == (20.0, 300.0)
    assert pull["requests"] == 1


def test_itl_parts(path: Path) -> None:
    write(path)

    rows = ask(path, "itl_parts")

    assert [(r["cause"], r["requests"], r["share"]) for r in rows] == [
        ("decode.token", 2, 0.8),
        ("step.connector", 1, 0.2),
    ]
    assert rows[0]["ms_per_token"] == pytest.approx(80 / 6)
    assert rows[1]["remedy"]


def test_tpot_over_time(path: Path) -> None:
    write(path)

    (row,) = ask(path, "tpot_over_time", **BUCKET)

    assert (second(row["ts"]), row["requests"], row["tpot_p50_ms"]) == (0, 2, 20.0)
    assert row["extension_us_per_token"] == pytest.approx(20_000 / 6)


def test_what_is_blamed_is_counted_by_when_the_victim_came(path: Path) -> None:
    write(path)

    assert [(r["request_id"], r["victims"], r["extension_ms"]) for r in ask(path, "blamed")] == [("r1", 1, 15.0)]
    assert ask(path, "blamed", to_ns=START_NS + 500 * MS) == []


def test_ttft_shares_are_one_row_and_sum_to_one(path: Path) -> None:
    write(path)

    (row,) = ask(path, "ttft_shares")

    assert (row["requests"], row["ttft_mean_ms"]) == (3, pytest.approx(400 / 3))
    classes = ("compute_run", "compute_queue", "coordination", "transfer", "unattributed")
    parts = [row[f"{name}_share"] for name in classes]
    assert parts == [0.4, 0.1, pytest.approx(0.39), 0.1, 0.01]
    assert (row["transfer_low_share"], row["transfer_high_share"]) == (28 / 400, 64 / 400)
    assert ask(path, "ttft_shares", mode="local") == []


def test_run_span_encloses_every_request(path: Path) -> None:
    """The first comes at 0, the last is done 300 ms after 2,000."""
    write(path)

    (row,) = ask(path, "run_span")

    assert (row["from_ms"], row["to_ms"], row["requests"]) == (START_NS // MS, START_NS // MS + 2301, 4)
