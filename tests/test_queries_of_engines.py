"""Named queries over events, as triples: a store with small round numbers, a query, the rows it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from kvtrace.store import Store
from tests.asked import ask
from tests.sample_store import MS, START_NS, Sample
from tests.test_queries_over_time import second
from tests.test_schema import append_events, append_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BASE_MS = START_NS // MS
SECOND = {"bucket_ns": str(1000 * MS)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a store in which p0 (process 1) prefills for d0 (process 2), both with one request."""
    sample = Sample()
    sample.add("r1")
    return sample.write(tmp_path / "run.duckdb")


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path, "write") as opened:
        append_process(opened, 1, pid=1, kind="core", engine_id="p0", role="kv_producer")
        append_process(opened, 2, pid=2, kind="core", engine_id="d0", role="kv_consumer")
        yield opened


def at(*rows: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Return event rows whose times, in ms, count from the trace's start."""
    return [(process, stage, BASE_MS + int(str(t_ms)), *rest) for process, stage, t_ms, *rest in rows]


def transfer(
    number: int, rank: int, begun: int, ended: int, done: int, descriptors: int = 4
) -> list[tuple[object, ...]]:
    """Return the events of a transfer of 1 MiB for the request p-1 to d-1 that P drives; times in ms."""
    return at(
        (1, "transfer.prepared", begun, "p-1", "d-1", number, descriptors, rank, 0),
        (1, "transfer.post_started", begun, "p-1", "", number, 0, 0, 0),
        (1, "transfer.post_ended", ended, "p-1", "", number, 1 << 20, descriptors, 0),
        (1, "transfer.done", done, "p-1", "", number, 0, 3, 0),
    )


def test_transfers_by_rank_names_the_peer_and_who_is_last(path: Path, store: Store) -> None:
    """Rank 1 is 4 ms later than rank 0."""
    append_events(store, *at((2, "decode.enqueued", 0, "d-1", "", 600, 0, 1, 0)))
    append_events(store, *transfer(7, 0, 10, 11, 14), *transfer(8, 1, 10, 12, 18))
    store.close()

    rows = ask(path, "transfers_by_rank")

    assert [(r["engine"], r["peer"], r["rank"], r["transfers"], r["post_p50_us"], r["seen_p50_ms"]) for r in rows] == [
        ("p0", "d0", 0, 1, 1000.0, 4.0),
        ("p0", "d0", 1, 1, 2000.0, 8.0),
    ]
    assert [(row["last"], row["last_share"]) for row in rows] == [(0, 0.0), (1, 1.0)]
    assert ask(path, "transfers_by_rank", engine="d0") == []
    assert ask(path, "transfers", to_ns=START_NS) == []


def test_descriptors(path: Path, store: Store) -> None:
    """4 and 7 descriptors go together, 8 do not; posting 1 ms over 4 descriptors is 250,000 ns each."""
    append_events(store, *transfer(1, 0, 0, 1, 2, 4), *transfer(2, 0, 10, 11, 12, 7), *transfer(3, 0, 20, 21, 22, 8))
    store.close()

    rows = ask(path, "descriptors")

    assert [(r["engine"], r["descriptors_from"], r["descriptors_to"], r["transfers"]) for r in rows] == [
        ("p0", 4, 7, 2),
        ("p0", 8, 15, 1),
    ]
    assert rows[0]["post_ns_per_descriptor"] == pytest.approx(2 * MS / 11)
    assert (rows[1]["moved_mib_p50"], rows[1]["kib_per_descriptor"], rows[1]["seen_p50_ms"]) == (1.0, 128.0, 2.0)
    assert rows[1]["gb_per_s_low"] == pytest.approx((1 << 20) / (2 * MS))


def test_handshakes_pair_each_start_with_its_end(path: Path, store: Store) -> None:
    append_events(
        store,
        *at(
            (2, "handshake.started", 0, "", "p0", 0, 0, 0, 0),
            (2, "handshake.ended", 30, "", "p0", 0, 1, 0, 0),
            (2, "handshake.started", 100, "", "p0", 0, 0, 0, 0),
            (2, "handshake.ended", 110, "", "p0", 0, 0, 0, 0),
            (2, "handshake.started", 200, "", "p0", 0, 0, 0, 0),
        ),
    )
    store.close()

    (row,) = ask(path, "handshakes")

    assert (row["engine"], row["peer"], row["rank"], row["handshakes"]) == ("d0", "p0", 0, 3)
    assert (row["failed"], row["unfinished"], row["p50_ms"], row["max_ms"]) == (1, 1, 20.0, 30.0)
    assert ask(path, "handshakes", engine="p0") == []


def test_leases(path: Path, store: Store) -> None:
    append_events(
        store,
        *at(
            (1, "prefill.lease_started", 0, "p-1", "", 0, 30_000 * MS, 0, 0),
            (1, "prefill.lease_started", 1, "p-2", "", 0, 30_000 * MS, 0, 0),
            (1, "prefill.lease_extended", 2, "p-1", "", 0, 0, 0, 0),
            (1, "prefill.lease_expired", 30_001, "p-2", "", 0, 0, 0, 0),
        ),
    )
    store.execute("UPDATE request SET held_blocks = 38, held_ns = 250000000")
    store.close()

    (row,) = ask(path, "leases")

    assert (row["engine"], row["leases"], row["extensions"], row["expired"], row["expired_share"]) == (
        "p0",
        2,
        1,
        1,
        0.5,
    )
    assert (row["lease_s"], row["held_p50_ms"], row["held_max_ms"], row["never_released"]) == (30.0, 250.0, 250.0, 0)


def test_failures_come_from_verdicts_and_from_points(path: Path, store: Store) -> None:
    append_events(
        store,
        *at(
            (1, "transfer.failed", 5, "p-9", "NIXL_ERR_REMOTE_DISCONNECT", 7, 0, 0, 0),
            (1, "transfer.failed", 6, "p-10", "NIXL_ERR_REMOTE_DISCONNECT", 8, 0, 0, 0),
            (1, "handshake.ended", 7, "", "d0", 0, 1, 0, 0),
            (2, "notification.orphaned", 8, "d-3", "", 0, 0, 0, 0),
        ),
    )
    store.execute("UPDATE request SET verdict = 'aborted'")
    store.close()

    rows = ask(path, "failures")

    assert [(r["kind"], r["what"], r["engine"], r["count"], r["example"]) for r in rows] == [
        ("transfer.failed", "NIXL_ERR_REMOTE_DISCONNECT", "p0", 2, "p-10"),
        ("notification.orphaned", "", "d0", 1, "d-3"),
        ("verdict", "aborted", "d0", 1, "r1"),
    ]
    assert [row["kind"] for row in ask(path, "failures", from_ns=START_NS + 8 * MS)] == ["notification.orphaned"]


def steps(process: int, *begins: int) -> list[tuple[object, ...]]:
    """Return the events of steps of 10 ms with 2 ms connector work, three requests in each."""
    rows: list[tuple[object, ...]] = []
    for number, begin in enumerate(begins):
        rows += [
            (process, "step.scheduled", begin, "", "", number, 8, 3, 0),
            (process, "step.started", begin + 1, "", "", number, 0, 0, 0),
            (process, "step.connected", begin + 9, "", "", number, 0, 2 * MS, 0),
            (process, "step.ended", begin + 10, "", "", number, 0, 0, 0),
        ]
    return at(*rows)


def test_steps_over_time_tell_the_sides_apart(path: Path, store: Store) -> None:
    append_events(store, *steps(1, 0, 2000), *steps(2, 100, 120, 140))
    store.close()

    rows = ask(path, "steps_over_time", **SECOND)

    assert [(second(r["ts"]), r["prefill_step_p50_ms"], r["decode_step_p50_ms"]) for r in rows] == [
        (0, 10.0, 10.0),
        (2, 10.0, None),
    ]
    assert (rows[0]["decode_connector_ms"], rows[0]["decode_requests"]) == (2.0, 3.0)
    assert [r["decode_step_p50_ms"] for r in ask(path, "steps_over_time", decode="d9", **SECOND)] == [None, None]
    assert [row["steps"] for row in ask(path, "steps", engine="d0", from_ns=START_NS + 110 * MS)] == [2]


def test_detection_is_counted_in_steps_of_d(path: Path, store: Store) -> None:
    """D begins a step every 20 ms and the request's KV waited 12 ms: 0.6 steps."""
    append_events(store, *steps(2, 100, 120, 140))
    store.close()

    (row,) = ask(path, "detection")

    assert (row["mode"], row["decode_engine"], row["requests"], row["detection_p50_ms"]) == ("push", "d0", 1, 12.0)
    assert (row["step_p50_ms"], row["steps_p50"], row["within_a_step_share"]) == (20.0, 0.6, 1.0)
    assert row["bracket_p50_ms"] == 12.0


def test_queues_over_time(path: Path, store: Store) -> None:
    """P's queue holds one request for 500 ms, D's one for 1.5 s, of which it waits 1 s for KV; the run ends with it."""
    append_events(
        store,
        *at(
            (1, "prefill.enqueued", 0, "p-1", "", 600, 0, 0, 0),
            (1, "prefill.scheduled", 500, "p-1", "", 1, 600, 0, 600),
            (2, "decode.enqueued", 0, "d-1", "", 600, 0, 1, 0),
            (2, "decode.allocated", 250, "d-1", "", 38, 599, 0, 0),
            (2, "decode.ready", 1250, "d-1", "", 0, 0, 0, 0),
            (2, "decode.scheduled", 1500, "d-1", "", 9, 1, 599, 600),
        ),
    )
    store.close()

    rows = ask(path, "queues_over_time", **SECOND)

    assert [(second(r["ts"]), r["prefill_waiting"], r["decode_waiting_for_kv"], r["decode_waiting"]) for r in rows] == [
        (0, 0.5, 0.75, 1.0),
        (1, 0.0, 0.5, 1.0),
    ]
    narrow = ask(path, "queues_over_time", from_ns=START_NS + 1000 * MS, **SECOND)
    assert [(second(row["ts"]), row["decode_waiting"]) for row in narrow] == [(1, 1.0)]


def test_queues_of_requests_that_are_years_apart_are_few_rows(path: Path, store: Store) -> None:
    """One waits on P for two years, as where a clock jumped: by the second that would be 60 million rows."""
    waited_ms = 2 * 365 * 86_400 * 1000
    append_events(
        store,
        *at(
            (1, "prefill.enqueued", 0, "p-1", "", 600, 0, 0, 0),
            (1, "prefill.scheduled", waited_ms, "p-1", "", 1, 600, 0, 600),
        ),
    )
    store.close()

    rows = ask(path, "queues_over_time", **SECOND)

    assert 9_000 < len(rows) <= 10_002
    assert {row["prefill_waiting"] for row in rows[1:-1]} == {1.0}


def test_recorder_says_how_far_behind_it_is(path: Path, store: Store) -> None:
    append_events(store, *at((1, "tracing.disabled", 5, "", "OSError", 0, 0, 0, 0)))
    store.execute("UPDATE process SET lost_records = 7, last_ns = $ns WHERE process = 1", {"ns": START_NS})
    store.remember(
        {
            "recorder.state": "recording",
            "recorder.lag_ms": "120",
            "recorder.skipped_files": "1",
            "recorder.published_ns": str(START_NS + 500 * MS),
        }
    )
    store.append("recorder", pa.table({"at_ns": [START_NS], "subject": ["x.spool"], "message": ["is cut short"]}))
    store.close()

    (row,) = ask(path, "recorder")

    assert (row["state"], row["events"], row["lost_records"], row["silenced"]) == ("recording", 1, 7, 1)
    assert (row["skipped_files"], row["messages"], row["lag_ms"], row["age_ms"]) == (1, 1, 120.0, 500.0)
    assert [(r["subject"], r["message"]) for r in ask(path, "recorder_messages")] == [("x.spool", "is cut short")]
    facts = {row["name"]: row["value"] for row in ask(path, "run_facts")}
    assert facts["format"] == "kvtrace"
    assert not any(name.startswith("recorder.") for name in facts)
