"""Lifecycle log lines: found among others, placed as the points that they are, joined although ids are hashed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtrace.importers import identity
from tests import import_records as records
from tests.import_records import handoff, lifecycle, logged, run
from tests.trace import MS, P_API, ns, push
from tests.trace import P as P_PROCESS

NOISE = (
    "INFO 09-09 01:46:40 [api_server.py:1] Started server process",
    "",
    "KV_CONNECTOR_LIFECYCLE without a record",
    '{"level": "info", "msg": "a line of another program"}',
    "Traceback (most recent call last):",
)
P, D = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"


def stages_of(path: Path) -> list[tuple[str, int]]:
    """Return the stored points with their times in ms, in time order."""
    found = records.rows(path, "SELECT stage::VARCHAR AS stage, t_ns FROM event ORDER BY t_ns, stage")
    return [(row["stage"], (row["t_ns"] - ns(0)) // MS) for row in found]


def test_lines_among_others_become_the_points_that_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "run.duckdb"
    file = records.write(tmp_path / "vllm.log", *NOISE, *handoff("x"), *NOISE)

    code, said = run(capsys, "-o", store, file)

    assert code == 0, said
    assert stages_of(store) == [
        ("decode.allocated", 10),
        ("decode.registration_queued", 12),
        ("decode.registration_sent", 20),
        ("registration.received", 21),
        ("prefill.finished", 40),
        ("transfer.matched", 50),
        ("transfer.begun", 51),
        ("decode.reported", 70),
        ("prefill.handed_over", 75),
    ]
    (request,) = records.requests(store).values()
    assert (request["request_id"], request["mode"], request["join_method"]) == (
        records.hashed("cmpl-x-0"),
        "push",
        "matched",
    )
    assert (request["verdict"], request["ttft_ns"]) == ("incomplete", None)
    assert "2 of 2 hashed ids joined no request known here: each keeps its hash" in said
    assert "tells no step, post or first token" in said


@pytest.mark.parametrize("order", ["client first", "log first", "together"])
def test_a_client_gives_the_ends_and_the_log_the_registration(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P was done at 40; D's registration was sent at 90 and came at 91: 51 ms of the TTFT are its lateness."""
    store = tmp_path / "run.duckdb"
    log = records.write(tmp_path / "vllm.log", *handoff("x", registered_ms=90))
    client = records.write(tmp_path / "p.jsonl", records.aiperf("x", -5, 125, 300))
    files = [client, log] if order == "client first" else [log, client]
    if order == "together":
        assert run(capsys, "-o", store, *files)[0] == 0
    else:
        assert run(capsys, "-o", store, files[0])[0] == 0
        assert run(capsys, "--into", store, files[1])[0] == 0

    (request,) = records.requests(store).values()
    causes = records.causes_ms(store, request["request_id"])
    assert (request["scope"], request["client_request_id"], request["ttft_ns"]) == ("client", "x", 125 * MS)
    # matched 91, begun 92, reported 111, first token 120
    assert causes == {"registration.late": 51, "prepare": 1, "unattributed": 125 - 52}
    assert request["note"].endswith("points imported from aiperf, vllm-lifecycle")
    assert (request["transfer_low_ns"], request["transfer_high_ns"]) == (0, 19 * MS)


def test_pull_is_told_from_push_and_its_order_to_load_is_a_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run.duckdb"
    pull = {"transfer_mode": "pull", "connector": "NixlConnector"}
    lines = [
        logged(lifecycle("transfer_staged", "producer", 40, P, block_count=38, **pull)),
        logged(lifecycle("transfer_staged", "consumer", 60, D, P, block_count=38, **pull)),
        logged(lifecycle("transfer_started", "consumer", 65, D, P, **pull)),
        logged(lifecycle("transfer_completed", "consumer", 80, D, P, **pull)),
        logged(lifecycle("transfer_completed", "producer", 85, P, **pull)),
    ]
    file = records.write(tmp_path / "vllm.log", *lines)
    client = records.write(tmp_path / "p.jsonl", records.aiperf("x", 0, 100, 300))

    code, said = run(capsys, "-o", store, file, client)

    (request,) = records.requests(store).values()
    assert code == 0, said
    assert (request["mode"], request["scope"], request["held_blocks"]) == ("pull", "client", 38)
    assert records.causes_ms(store, "x") == {"submit.wait": 5, "unattributed": 95}
    assert request["transfer_high_ns"] == 15 * MS


def test_hashed_ids_meet_the_ids_that_a_recorder_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P ran without kvtrace, D with it: D's records name P's request, whose hash is in P's log."""
    trace = push()
    trace.events = [event for event in trace.events if event.process not in (P_PROCESS, P_API)]
    trace.events = [
        event._replace(ref="cmpl-r1-0-aaaaaaaa") if event.stage == "decode.enqueued" else event
        for event in trace.events
    ]
    store = records.recorded(tmp_path / "run.duckdb", trace)
    p, d = "cmpl-r1-0-aaaaaaaa", "cmpl-r1-0-bbbbbbbb"
    lines = [
        logged(lifecycle("transfer_staged", "producer", 31, p, block_count=38)),
        logged(lifecycle("blocks_matched", "producer", 35, p, d)),
    ]

    _, said = run(capsys, "--into", store, records.write(tmp_path / "p.log", *lines))

    request = records.requests(store)["r1"]
    events = records.rows(store, "SELECT DISTINCT request FROM event WHERE stage = 'transfer.matched'")
    assert [row["request"] for row in events] == [p]
    assert (request["join_method"], request["held_blocks"]) == ("matched", 38)
    assert "2 lines" not in said
    assert "keep their hash" not in said


def test_a_log_beside_the_recorders_own_points_makes_no_second_leg(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = records.recorded(tmp_path / "run.duckdb", push())
    before = records.requests(store)["r1"]
    lines = [
        logged(lifecycle("transfer_staged", "producer", 31, "cmpl-r1-0-aaaaaaaa", block_count=38)),
        logged(lifecycle("transfer_completed", "consumer", 44, "cmpl-r1-0-bbbbbbbb", "cmpl-r1-0-aaaaaaaa")),
    ]

    run(capsys, "--into", store, records.write(tmp_path / "p.log", *lines))

    after = records.requests(store)
    assert list(after) == ["r1"]
    same = ("ttft_ns", "compute_ns", "coordination_ns", "transfer_ns", "verdict", "prefill_engine", "decode_engine")
    assert {name: after["r1"][name] for name in same} == {name: before[name] for name in same}


def test_legs_in_different_files_and_under_different_names_are_one_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router sent each leg under an id of its own: D's lines name P's request."""
    store = tmp_path / "run.duckdb"
    p, d = "cmpl-one-0-aaaaaaaa", "cmpl-two-0-bbbbbbbb"
    logs = [
        records.write(tmp_path / "p.log", logged(lifecycle("transfer_staged", "producer", 40, p, block_count=3))),
        records.write(tmp_path / "d.log", logged(lifecycle("transfer_staged", "consumer", 60, d, p, block_count=3))),
    ]

    code, said = run(capsys, "-o", store, *logs)

    assert code == 0, said
    assert len(records.requests(store)) == 1


def test_hosts_in_one_log_are_told_apart_by_their_clocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D's host was started an hour before P's; each keeps a clock of its own."""
    store = tmp_path / "run.duckdb"
    lines = [
        logged(lifecycle("transfer_staged", "producer", 40, P)),
        logged(
            lifecycle("transfer_staged", "consumer", 60, D, P, monotonic_ns=ns(60) - records.BOOTED_NS + 3_600 * 10**9)
        ),
    ]
    file = records.write(tmp_path / "all.log", *lines)

    code, said = run(capsys, "-o", store, file)
    domains = {row["domain"] for row in records.rows(store, "SELECT domain FROM process")}
    refused, why = run(capsys, "-o", tmp_path / "other.duckdb", "--same-host", file)

    assert code == 0, said
    assert len(domains) == 2
    assert refused == 1
    assert "line 2: its clocks are not those of the lines before, so --same-host does not hold" in why


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: json.dumps({"log": line + "\n", "stream": "stdout"}),
        lambda line: (
            "2026-09-09T01:46:40Z stdout F " + json.dumps({"kubernetes": {"pod": "p"}, "data": {"message": line}})
        ),
        lambda line: f"\x1b[36m{line}\x1b[0m",
    ],
)
def test_what_a_collector_wraps_around_a_line_is_no_hindrance(
    wrap: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(wrap)
    store = tmp_path / "run.duckdb"
    file = records.write(tmp_path / "x.log", *(wrap(line) for line in handoff("x")))

    code, said = run(capsys, "-o", store, file)

    assert code == 0, said
    assert len(stages_of(store)) == 9


def test_ends_that_are_failures_are_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "run.duckdb"
    lines = [
        logged(lifecycle("transfer_staged", "producer", 40, P)),
        logged(lifecycle("transfer_failed", "producer", 30_040, P)),
        logged(lifecycle("registration_failed", "consumer", 480_000, D)),
    ]

    _, said = run(capsys, "-o", store, records.write(tmp_path / "x.log", *lines))

    (request,) = records.requests(store).values()
    assert request["verdict"] == "expired"
    assert "1 line (consumer registration_failed) left out: no point known here" in said


def line_of(**changed: object) -> str:
    """Return a log line whose record has other values than it should."""
    return logged(lifecycle("transfer_staged", "producer", 40, P, **changed))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (line_of()[:-20], "the record is cut short"),
        (line_of().replace('"event":', '"event";'), "is not JSON"),
        (line_of(schema="vllm-kv-connector-v2"), "its schema is not vllm-kv-connector-v1"),
        (line_of(wall_ns=-5), "wall_ns is no unix time in ns"),
        (line_of(wall_ns=10**30), "wall_ns is no unix time in ns"),
        (line_of(wall_ns="now"), "is no such record: wall_ns is of type str, and int is wanted"),
        (line_of(wall_ns=float("nan")), "is no such record: wall_ns is of type float, and int is wanted"),
        (line_of(monotonic_ns=-1), "monotonic_ns is no reading of a clock"),
        (line_of(request_id_hash="x" * 10_000), "a hash of a request's id is not 16 hexadecimal digits"),
        (line_of(block_count=-1), "block_count is no count"),
        (
            line_of().replace('"schema":"vllm-kv-connector-v1",', ""),
            "is no such record: it lacks the field schema",
        ),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_imported(
    line: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run.duckdb"
    file = records.write(tmp_path / "x.log", *NOISE[:1], *handoff("x")[:2], line)

    code, said = run(capsys, "-o", store, file)

    assert code == 1
    assert f"x.log: line 4: {complaint}" in said
    assert said.endswith("; nothing was imported\n")
    assert said.count("\n") == 1
    assert not store.exists()


def test_the_hash_is_vllms() -> None:
    """Eight bytes of BLAKE2b, personalised; a changed byte of this and nothing would ever join."""
    assert identity.hashed("cmpl-x-0") == records.hashed("cmpl-x-0")
    assert identity.logged_group("cmpl-x-0-0123ABCD") == "cmpl-x-0"


def test_a_file_of_endless_hosts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line with a clock of its own is no log of a cluster; it would cost a process row each."""
    lines = [line_of(monotonic_ns=number * 10**9) for number in range(1, 200)]

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", records.write(tmp_path / "x.log", *lines))

    assert code == 1
    assert "line 65: its clocks are those of none of the 64 hosts before" in said
