"""Load generators' records: joined by id, the scope widened to the client, shares exact, doubts said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace import stages
from kvtrace.importers import aiperf as aiperf_format
from kvtrace.importers import identity
from kvtrace.importers.source import open_source
from kvtrace.router.identity import alias
from tests import import_records as records
from tests.import_records import run
from tests.test_attribution import PUSH_CAUSES
from tests.trace import JITTER_BYTES, MS, Trace, check_tiles, jittered, ns, pull, push


def renamed(trace: Trace, client_id: str, attempt: int = 0) -> Trace:
    """Return the trace with the id that a client sent to the router."""
    trace.events = [
        event._replace(ref=client_id, a=attempt) if event.stage == "router.received" else event
        for event in trace.events
    ]
    return trace


def test_a_joined_client_widens_the_scope_and_every_other_cause_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client sent 2 ms before the router received and had its token 3 ms after it left the router."""
    store = records.recorded(tmp_path / "run.duckdb", renamed(push(), "client-7"))
    file = records.write(tmp_path / "profile_export.jsonl", records.aiperf("client-7", -2, 65, 101))

    code, said = run(capsys, "--into", store, file)

    request = records.requests(store)["r1"]
    assert code == 0, said
    assert (request["scope"], request["verdict"], request["client_request_id"]) == ("client", "complete", "client-7")
    assert (request["ttft_ns"], request["end_ns"]) == (65 * MS, ns(101))
    assert request["note"] == "points imported from aiperf"
    assert records.causes_ms(store, "r1") == pytest.approx({**PUSH_CAUSES, "client.hop": 2, "client.reply": 3})
    assert "profile_export.jsonl: 1 record of aiperf, 1 joined, 3 points added" in said
    facts = {row["name"]: row["value"] for row in records.rows(store, "SELECT name, value FROM run")}
    assert facts["imported.aiperf"] == "profile_export.jsonl: 1 record"


@pytest.mark.parametrize("same_host", [False, True])
def test_a_clients_clock_is_its_own_unless_it_is_stated_to_be_of_the_host(
    same_host: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = records.recorded(tmp_path / "run.duckdb", push())
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))

    code, said = run(capsys, "--into", store, file, *(["--same-host"] if same_host else []))

    crossing = records.rows(store, "SELECT DISTINCT cause FROM segment WHERE crosses_hosts ORDER BY cause")
    assert code == 0, said
    assert [row["cause"] for row in crossing] == ([] if same_host else ["client.hop", "client.reply"])


def test_a_client_whose_clock_is_off_is_not_placed_and_the_request_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its clock is 10 ms ahead: it claims to have sent 8 ms after the router received."""
    store = records.recorded(tmp_path / "run.duckdb", push())
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", 8, 65, 111))

    run(capsys, "--into", store, file)

    request = records.requests(store)["r1"]
    assert (request["scope"], request["ttft_ns"]) == ("router", 60 * MS)
    assert "its client's clock is 8.00 ms or more off" in request["note"]


def test_a_record_of_no_known_request_stands_alone_and_is_all_unattributed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = records.recorded(tmp_path / "run.duckdb", push())
    file = records.write(tmp_path / "p.jsonl", records.aiperf("stranger", 0, 50, 90), records.aiperf(None, 0, 40, 90))

    _, said = run(capsys, "--into", store, file)

    found = records.requests(store)
    alone = found["stranger"]
    assert (alone["scope"], alone["verdict"], alone["unattributed_ns"]) == ("client", "incomplete", 50 * MS)
    assert (alone["transfer_low_ns"], alone["transfer_high_ns"]) == (0, 50 * MS)
    assert len(found) == 3
    assert found["r1"]["scope"] == "router"
    assert "2 of 2 records joined no request known here: each stands alone" in said


def test_ids_that_repeat_join_nothing_by_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests bear one client's id: records join the one within their own time, and nothing where both are."""
    first, second = renamed(push(name="a"), "same"), renamed(push(name="b").later(1000), "same")
    store = records.recorded(tmp_path / "run.duckdb", first, second)
    file = records.write(
        tmp_path / "p.jsonl",
        records.aiperf("same", -1, 62, 100),
        records.aiperf("same", 999, 62, 1100),
        records.aiperf("same", -5, 2000, 2000),
    )

    _, said = run(capsys, "--into", store, file)

    found = records.requests(store)
    assert (found["a"]["scope"], found["b"]["scope"]) == ("client", "client")
    assert len(found) == 3
    assert "1 of 3 records joined no request known here" in said


def test_a_second_record_of_one_id_stays_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = records.recorded(tmp_path / "run.duckdb", push())
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -1, 62, 100), records.aiperf("r1", -3, 66, 100))

    _, said = run(capsys, "--into", store, file)

    found = records.requests(store)
    assert found["r1"]["ttft_ns"] == 62 * MS
    assert len(found) == 2
    assert "1 of those bore an id that another record has" in said


@pytest.mark.parametrize("client_id", ["r1", "nobody's", None])
@pytest.mark.parametrize("other", [(66, 100), (62, 110), (None, 100)])
def test_records_of_one_id_and_start_stay_apart_by_their_other_times(
    other: tuple[float | None, float], client_id: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether in one file, in two or in one that has grown: a request is made of one record's points only.

    Of records without an id, the place in the file tells: the second one counts anew in the file that it has alone.
    """
    store = records.recorded(tmp_path / "run.duckdb", push())
    first, second = records.aiperf(client_id, -1, 62, 100), records.aiperf(client_id, -1, *other)
    both = records.write(tmp_path / "both.jsonl", first, second)
    alone = records.write(tmp_path / "alone.jsonl", second)
    grown = records.write(tmp_path / "grown.jsonl", first, second, records.aiperf("later", 500, 62, 600))

    for file in (both, alone, grown):
        code, said = run(capsys, "--into", store, file)
        assert code == 0, said

    rows = records.rows(
        store,
        "SELECT request, list(stage::VARCHAR ORDER BY stage) AS stages, list(t_ns ORDER BY stage) AS times FROM event "
        "WHERE starts_with(stage::VARCHAR, 'client.') GROUP BY request",
    )
    token_ms, done_ms = other
    times = tuple(ns(at) for at in (-1, token_ms and token_ms - 1, done_ms) if at is not None)
    kept = [(ns(-1), ns(61), ns(100)), (ns(500), ns(562), ns(600)), *[times] * (2 if client_id is None else 1)]
    assert sorted(tuple(row["times"]) for row in rows) == sorted(kept)
    assert all(len(set(row["stages"])) == len(row["stages"]) for row in rows)
    assert len(records.requests(store)) == len(rows) + (client_id != "r1")


def test_a_retry_is_joined_to_the_attempt_that_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = renamed(push(name="a").without("router.first_token"), "client-7")
    store = records.recorded(tmp_path / "run.duckdb", failed, renamed(push(name="b").later(2, 300), "client-7", 1))
    file = records.write(tmp_path / "p.jsonl", records.aiperf("client-7", -2, 66, 110))

    run(capsys, "--into", store, file)

    found = records.requests(store)
    assert (found["b"]["scope"], found["b"]["ttft_ns"], found["a"]["scope"]) == ("client", 66 * MS, "engine")


@pytest.mark.parametrize(
    ("changed", "verdict", "reason"),
    [
        ({"error": {"code": 503, "type": "ServiceUnavailable", "message": records.PROMPT}}, "failed", "ServiceUnavai"),
        ({"metadata": {"was_cancelled": True}}, "aborted", "cancelled"),
        ({"error": {"code": None, "type": None, "message": "x"}}, "failed", "error"),
    ],
)
def test_a_client_without_an_answer_is_a_verdict(
    changed: dict[str, object], verdict: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file = tmp_path / "run.duckdb", tmp_path / "p.jsonl"
    records.write(file, records.aiperf("x", 0, None, 90, **changed))

    code, said = run(capsys, "-o", store, file)

    request = records.requests(store)["x"]
    assert code == 0, said
    assert (request["verdict"], request["scope"], request["ttft_ns"]) == (verdict, "client", None)
    assert reason in request["note"]


def test_a_reply_that_is_not_streamed_has_no_first_token_at_the_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = records.recorded(tmp_path / "run.duckdb", push())
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, None, 101))

    run(capsys, "--into", store, file)

    assert records.requests(store)["r1"]["scope"] == "router"


@pytest.mark.parametrize(("unit", "value"), [("ns", 62e6), ("us", 62e3), ("ms", 62), ("s", 0.062), ("sec", 0.062)])
def test_a_ttft_may_be_in_any_unit_that_says_its_name(unit: str, value: float, tmp_path: Path) -> None:
    metrics = {"time_to_first_token": {"value": value, "unit": unit}}
    file = records.write(tmp_path / "p.jsonl", records.aiperf("x", 0, None, 90, metrics=metrics))

    (record,) = aiperf_format.read(open_source(file))

    assert record.first_token_ns == ns(62)
    assert (record.prompt_tokens, record.output_tokens) == (600, 16)


@settings(max_examples=200)
@given(
    mode=st.sampled_from([push, pull]),
    noise=st.binary(min_size=JITTER_BYTES, max_size=JITTER_BYTES),
    dropped=st.sets(st.integers(0, 60), max_size=40),
    sent_ms=st.floats(-50, 50),
    token_ms=st.floats(-50, 200),
)
def test_shares_of_the_scope_client_sum_whatever_happens(
    mode: Callable[[], Trace], noise: bytes, dropped: set[int], sent_ms: float, token_ms: float
) -> None:
    """Points missing and displaced within a client's record, or around it: the segments tile, the shares sum."""
    trace = mode()
    events = jittered(trace.events, noise)
    trace.events = [event for index, event in enumerate(events) if index not in dropped]
    trace.at(sent_ms, stages.CLIENT_SENT, "r1").at(token_ms, stages.CLIENT_FIRST_TOKEN, "r1")

    check_tiles(trace)
    assert all(
        answer.start_ns == ns(sent_ms) and answer.first_token_ns == ns(token_ms)
        for answer in trace.answers()
        if answer.scope == "client" and answer.ttft_ns is not None
    )


def test_nothing_of_what_was_said_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts, answers and messages of errors stay out: the bytes of the store do not have them."""
    store = tmp_path / "run.duckdb"
    broken = records.aiperf("b", 0, None, 90, error={"code": 500, "type": "E", "message": records.PROMPT})
    files = [
        records.write(tmp_path / "p.jsonl", records.aiperf("a", 0, 50, 90), broken),
        records.write(tmp_path / "b.json", json.dumps(records.bench((1.0, 0.1, 0.5)))),
    ]

    code, said = run(capsys, "-o", store, *files)

    assert code == 0, said
    assert records.PROMPT.encode() not in store.read_bytes()
    assert records.PROMPT not in said


def test_the_client_id_is_compared_as_the_router_keeps_it() -> None:
    """The router stores an alias fit for headers; both make the same of any id."""
    for text in ("plain", "x" * 10_000, "a\x1bb\nc", " blank ", "日本語\u202e", "ÿ"):
        assert identity.printable(text) == alias([(b"x-request-id", text.encode())])
