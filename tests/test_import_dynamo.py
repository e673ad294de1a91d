"""Dynamo's request trace: durations become points, and what passed between them is not guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import import_records as records
from tests.import_records import run
from tests.trace import MS, START_NS, ns


def segments(path: Path, request_id: str) -> list[tuple[str, int, str]]:
    """Return (cause, ms, what it waited for) of one request's critical path."""
    sql = "SELECT cause, duration_ns, waited_for FROM critical_path WHERE request_id = $id ORDER BY position"
    found = records.rows(path, sql, id=request_id)
    return [(row["cause"], row["duration_ns"] // MS, row["waited_for"]) for row in found]


@pytest.mark.parametrize("wrapped", [False, True])
def test_durations_are_placed_and_what_passed_between_them_is_not_guessed(
    wrapped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run.duckdb"
    file = records.write(tmp_path / "trace.jsonl", records.dynamo("a", 0, wrapped=wrapped))

    code, said = run(capsys, "-o", store, file)

    request = records.requests(store)["a"]
    assert code == 0, said
    assert (request["scope"], request["client_request_id"], request["ttft_ns"]) == ("router", "client-a", 150 * MS)
    assert (request["verdict"], request["end_ns"]) == ("incomplete", ns(400))
    assert segments(store, "a") == [
        ("unattributed", 10, "whatever followed router.received"),
        ("unattributed", 100, "whatever followed router.prefill_sent"),
        ("unattributed", 40, "whatever followed router.prefill_returned"),
    ]
    assert (request["transfer_low_ns"], request["transfer_high_ns"]) == (0, 150 * MS)
    assert "tells the hops that its router saw and not what passed within them" in said


def test_without_a_hand_over_its_ttft_is_the_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One worker did both: `ttft_ms` ends with the first token that left."""
    store = tmp_path / "run.duckdb"
    one = {"prefill_worker_id": 1, "decode_worker_id": 1}
    lines = [
        records.dynamo("one", 0, kv_transfer_estimated_latency_ms=None, worker=one),
        records.dynamo("none", 0, kv_transfer_estimated_latency_ms=None, worker=None),
        records.dynamo("two", 0, kv_transfer_estimated_latency_ms=None),
    ]

    run(capsys, "-o", store, records.write(tmp_path / "trace.jsonl", *lines))

    found = records.requests(store)
    assert {name: row["ttft_ns"] for name, row in found.items()} == {"one": 110 * MS, "none": 110 * MS, "two": None}


def test_a_client_joins_by_the_id_that_it_sent_and_stays_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run.duckdb"
    trace = records.write(tmp_path / "trace.jsonl", records.dynamo("a", 0))
    client = records.write(tmp_path / "p.jsonl", records.aiperf("client-a", -3, 160, 420))
    more = records.write(tmp_path / "more.jsonl", records.dynamo("a", 0), records.dynamo("b", 1000))

    assert run(capsys, "-o", store, trace, client)[0] == 0
    assert run(capsys, "--into", store, more)[0] == 0

    found = records.requests(store)
    assert (found["a"]["scope"], found["a"]["ttft_ns"]) == ("client", 160 * MS)
    assert records.causes_ms(store, "a") == {"client.hop": 3, "unattributed": 150, "client.reply": 7}
    assert found["b"]["scope"] == "router"
    assert records.rows(store, "SELECT count(*) AS n FROM event WHERE stage = 'router.received'") == [{"n": 2}]


def test_engines_that_kvtrace_records_lie_within(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dynamo gives its own id to the engines: their points join its record without anybody's help."""
    from tests.trace import push

    engines = push(name="a")
    engines.events = [event for event in engines.events if not event.stage.startswith("router.")]
    store = records.recorded(tmp_path / "run.duckdb", engines)
    line = records.dynamo(
        "a", 0, prefill_wait_time_ms=1.0, ttft_ms=33.0, kv_transfer_estimated_latency_ms=27.0, total_time_ms=95.0
    )

    run(capsys, "--into", store, records.write(tmp_path / "trace.jsonl", line))

    request = records.requests(store)["a"]
    assert (request["scope"], request["ttft_ns"], request["verdict"]) == ("router", 60 * MS, "complete")
    assert records.causes_ms(store, "a")["prefill.forward"] == 20


def test_tools_and_payloads_are_passed_over_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "run.duckdb"
    about = {"schema": "dynamo.request.trace.v1", "event_time_unix_ms": 1}
    lines = [
        json.dumps({**about, "event_type": "tool_end", "tool": {"tool_call_id": "x", "tool_class": records.PROMPT}}),
        json.dumps({**about, "event_type": "request_payload", "payload": {"request": {"messages": records.PROMPT}}}),
        records.dynamo("a", 0),
        records.dynamo("b", 0, request_received_ms=None),
    ]

    code, said = run(capsys, "-o", store, records.write(tmp_path / "trace.jsonl", *lines))

    assert code == 0, said
    assert set(records.requests(store)) == {"a"}
    assert "2 records of tools or payloads passed over unread" in said
    assert "1 of 2 records gave no time of arrival and could not be placed" in said
    assert records.PROMPT.encode() not in store.read_bytes()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (records.dynamo("a", 0).replace("trace.v1", "trace.v2"), "its schema is not dynamo.request.trace.v1"),
        (records.dynamo("a", 0)[:-10], "the record is cut short"),
        (records.dynamo("", 0), "has an empty request_id"),
        (records.dynamo("a", -START_NS // MS), "request_received_ms is no unix time"),
        (records.dynamo("a", 0, ttft_ms=-1.0), "ttft_ms is no duration between 0 and 30 days"),
        (records.dynamo("a", 0, total_time_ms=1e300), "total_time_ms is no duration"),
        (records.dynamo("a", 0, total_time_ms=100.0), "its first token comes 50.0 ms after its end"),
        (
            records.dynamo("a", 0, ttft_ms="soon"),
            "is no such record: request.ttft_ms is of type str, and float is wanted",
        ),
        ('{"schema": "dynamo.request.trace.v1", "event_type": "request_end"}', "is a request_end without a request"),
        ('{"x": ' + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_imported(
    line: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run.duckdb"

    code, said = run(capsys, "-o", store, records.write(tmp_path / "t.jsonl", records.dynamo("ok", 0), line))

    assert code == 1
    assert f"t.jsonl: line 2: {complaint}" in said
    assert said.count("\n") == 1
    assert not store.exists()
