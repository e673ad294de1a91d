"""Named queries as triples: a store with small round numbers, a query, the rows it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from kvtrace.store import Store
from tests.asked import ask
from tests.sample_store import Sample
from tests.test_schema import append_events, append_process

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
PATH = (
    ("router.decide", "coordination", "router", "", 10),
    ("prefill.queue", "compute.queue", "prefill", "a slot", 20),
    ("prefill.forward", "compute.run", "prefill", "", 30),
    ("wire", "transfer", "transfer", "", 40),
)
LONG = (*PATH, ("unattributed", "unattributed", "process", "", 100))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def write_requests(path: Path) -> None:
    sample = Sample()
    sample.add("r1", PATH, ())
    sample.add("r2", LONG, (("registration", "coordination", "decode", 5, 8, 40),), start_ms=500)
    sample.write(path)


def test_slowest_requests(path: Path) -> None:
    write_requests(path)

    rows = ask(path, "slowest_requests", limit="1")

    assert [(r["request_id"], r["ttft_ms"], r["coordination_ms"], r["top_cause"], r["top_cause_ms"]) for r in rows] == [
        ("r2", 200.0, 10.0, "unattributed", 100.0)
    ]
    assert [row["request_id"] for row in ask(path, "slowest_requests")] == ["r2", "r1"]
    assert ask(path, "slowest_requests", mode="pull") == []


def test_a_parameter_is_bound_and_never_pasted(path: Path) -> None:
    write_requests(path)

    assert ask(path, "slowest_requests", mode="push' OR '1'='1") == []


def test_shares_by_class(path: Path) -> None:
    write_requests(path)

    rows = ask(path, "shares_by_class")

    assert [(r["class"], r["requests"], r["share"], r["mean_ms"], r["p50_ms"]) for r in rows] == [
        ("compute.run", 2, 0.2, 30.0, 30.0),
        ("compute.queue", 2, pytest.approx(40 / 300), 20.0, 20.0),
        ("coordination", 2, pytest.approx(20 / 300), 10.0, 10.0),
        ("transfer", 2, pytest.approx(80 / 300), 40.0, 40.0),
        ("unattributed", 2, pytest.approx(100 / 300), 50.0, 50.0),
    ]


def test_causes(path: Path) -> None:
    write_requests(path)

    rows = ask(path, "causes")

    assert [(r["cause"], r["class"], r["requests"], r["total_ms"], r["p50_ms"]) for r in rows] == [
        ("unattributed", "unattributed", 1, 100.0, 100.0),
        ("wire", "transfer", 2, 80.0, 40.0),
        ("prefill.forward", "compute.run", 2, 60.0, 30.0),
        ("prefill.queue", "compute.queue", 2, 40.0, 20.0),
        ("router.decide", "coordination", 2, 20.0, 10.0),
    ]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert all(row["remedy"] for row in rows)


def test_causes_of_two_scopes_stay_apart(path: Path) -> None:
    """30 of 100 ms as the router saw it, 30 of 50 as the engines did: each share is of its own scope's time."""
    sample = Sample()
    for name, scope, queued_ms in (("r1", "router", 70), ("r2", "engine", 20)):
        computed = ("prefill.forward", "compute.run", "prefill", "", 30)
        sample.add(name, (computed, ("prefill.queue", "compute.queue", "prefill", "", queued_ms)), (), scope=scope)
    sample.write(path)

    shares = {(r["scope"], r["cause"]): (r["requests"], r["share"]) for r in ask(path, "causes")}

    assert shares == {
        ("router", "prefill.forward"): (1, 0.3), ("router", "prefill.queue"): (1, 0.7),
        ("engine", "prefill.forward"): (1, 0.6), ("engine", "prefill.queue"): (1, 0.4),
    }  # fmt: skip


PARTS = (
    ("decode.turn", "coordination", 5), ("step.connector", "coordination", 10), ("decode.token", "compute.run", 55),
    ("decode.mixed", "compute.run", 20), ("unattributed", "unattributed", 10),
)  # fmt: skip


def write_paces(path: Path) -> None:
    """Write three requests; r1's four tokens waited 7 ms for r2's transfers, 1 for its own, and r3's for r2's."""
    sample = Sample()
    for name in ("r1", "r2", "r3"):
        sample.add(name, PATH, ())
    sample.add_pace("r1", PARTS, (20, 20, 20, 40), r2=7, r1=1)
    sample.add_pace("r3", PARTS[2:3], (55,), r2=2)
    sample.write(path)


def test_tpot(path: Path) -> None:
    write_paces(path)

    rows = ask(path, "tpot")

    assert [(r["request_id"], r["tokens"], r["tpot_ms"], r["itl_p50_ms"], r["itl_max_ms"]) for r in rows] == [
        ("r3", 1, 55.0, 55.0, 55.0),
        ("r1", 4, 25.0, 20.0, 40.0),
    ]
    paced = rows[1]
    assert (paced["extension_ms"], paced["by_others_ms"], paced["occupancy_ms"]) == (10.0, 7.0, 20.0)
    assert (paced["mixed_ms"], paced["unattributed_ms"]) == (20.0, 10.0)
    assert ask(path, "tpot", mode="pull") == []


def test_blamed(path: Path) -> None:
    write_paces(path)

    rows = ask(path, "blamed")

    assert [(r["request_id"], r["victims"], r["extension_ms"], r["descriptors"]) for r in rows] == [("r2", 2, 9.0, 20)]


def test_blocks(path: Path) -> None:
    """Push reserves 40 blocks on D 0.5 s early, pull 0.1 s; on P one of two was aborted and held for 2 s more."""
    sample = Sample()
    early = {"reserved_blocks": 40, "reserved_ns": 500 * MS, "held_blocks": 40, "held_ns": 100 * MS}
    sample.add("r1", PATH, (), **early)
    sample.add("r2", PATH, (), **early | {"held_ns": 2_100 * MS, "held_after_end_ns": 2_000 * MS})
    sample.add("r3", PATH, (), mode="pull", **early | {"reserved_ns": 100 * MS})
    sample.write(path)

    rows = ask(path, "blocks")

    assert [(r["mode"], r["requests"], r["reserved_block_seconds"], r["held_block_seconds"]) for r in rows] == [
        ("pull", 1, 4.0, 4.0),
        ("push", 2, 40.0, 88.0),
    ]
    assert [(r["reserved_p50_ms"], r["held_p50_ms"], r["held_after_end_block_seconds"]) for r in rows] == [
        (100.0, 100.0, 0.0),
        (500.0, 1100.0, 80.0),
    ]


def test_integrity(path: Path) -> None:
    """Of three chosen push requests one is whole, one has a block that differs, one has unchecked blocks."""
    sample = Sample()
    for number, (checked, corrupt, unchecked) in enumerate(((5, 0, 0), (5, 1, 0), (3, 0, 2))):
        found = {"checked_blocks": checked, "corrupt_blocks": corrupt, "unchecked_blocks": unchecked}
        sample.add(f"r{number}", PATH, (), **found)
    sample.add("r9", PATH, (), checked_blocks=None)
    sample.write(path)

    assert [tuple(row.values()) for row in ask(path, "integrity")] == [("push", 3, 1, 1, 13, 1, 2)]


def test_hidden_work(path: Path) -> None:
    write_requests(path)

    rows = ask(path, "hidden_work")

    assert [(r["cause"], r["requests"], r["p50_ms"], r["slack_min_ms"]) for r in rows] == [
        ("registration", 1, 8.0, 40.0)
    ]


def test_registrations_are_late_or_in_time(path: Path) -> None:
    rows = [(10, "P", "D", 40 * MS), (11, "P", "D", 20 * MS), (12, "P", "D", -30 * MS), (13, "P", "D", None)]
    names = ("request_key", "prefill_engine", "decode_engine", "registration_late_ns")
    with Store.open(path, "write") as store:
        store.append("request", pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]))

    assert ask(path, "registrations") == [
        {
            "prefill_engine": "P", "decode_engine": "D", "requests": 3, "late": 2, "late_share": pytest.approx(2 / 3),
            "late_p50_ms": 30.0, "late_max_ms": 40.0, "slack_p50_ms": 30.0,
        }
    ]  # fmt: skip


def test_transfers(path: Path) -> None:
    """The bracket runs from the last poll that said pending to the first sign of completion."""
    with Store.open(path, "write") as store:
        append_process(store, 1, kind="core", engine_id="P")
        append_events(
            store,
            (1, "transfer.prepared", 3, "p-1", "d-1", 9, 4, 0, 0),
            (1, "transfer.post_started", 4, "p-1", "", 9, 0, 0, 0),
            (1, "transfer.post_ended", 5, "p-1", "", 9, 1048576, 4, 0),
            (1, "transfer.done", 9, "p-1", "", 9, -993 * MS, 3, 0),
            (1, "transfer.post_started", 14, "p-2", "", 10, 0, 0, 0),
            (1, "transfer.failed", 15, "p-2", "gone", 10, 0, 0, 0),
        )

    row = ask(path, "transfers")[0]

    assert (row["transfers"], row["failed"], row["unfinished"], row["moved_mib"]) == (2, 1, 0, 1.0)
    assert (row["post_p50_us"], row["bracket_p50_ms"], row["seen_p50_ms"]) == (1000.0, 2.0, 5.0)
    assert row["done_at_post_share"] == 0.0


def test_a_bracket_does_not_begin_before_the_post_was_over(path: Path) -> None:
    """Nobody saw it under way: its last descriptor was posted at 6, so it cannot have ended before; done at 9."""
    with Store.open(path, "write") as store:
        append_process(store, 1, kind="core", engine_id="P")
        append_events(
            store,
            (1, "transfer.post_started", 4, "p-1", "", 9, 0, 0, 0),
            (1, "transfer.post_ended", 6, "p-1", "", 9, 1048576, 4, 0),
            (1, "transfer.done", 9, "p-1", "", 9, 0, 3, 0),
        )

    assert [row["bracket_p50_ms"] for row in ask(path, "transfers")] == [3.0]


def test_steps(path: Path) -> None:
    with Store.open(path, "write") as store:
        append_process(store, 1, kind="core", engine_id="P")
        for step, begin in ((1, 0), (2, 20)):
            append_events(
                store,
                (1, "step.scheduled", begin + 1, "", "", step, 10 * step, step, 0),
                (1, "step.started", begin + 2, "", "", step, 0, 0, 0),
                (1, "step.forwarded", begin + 8, "", "", step, 0, 0, 0),
                (1, "step.connected", begin + 9, "", "", step, 0, 1_000_000, 0),
                (1, "step.ended", begin + 11, "", "", step, (step - 1) * 4_000_000, 0, 0),
                (1, "step.result_starved", begin + 11, "", "", step, 0, 500_000, 0),
            )
        append_events(store, (1, "step.worker_starved", 29, "", "", 2, 0, 3_000_000, 500_000))

    row = ask(path, "steps")[0]

    assert (row["engine"], row["steps"], row["tokens_per_step"], row["requests_per_step"]) == ("P", 2, 15.0, 1.5)
    assert (row["step_p50_ms"], row["forward_p50_ms"], row["connector_p50_us"]) == (10.0, 6.0, 1000.0)
    assert row["connector_share"] == pytest.approx(0.1)
    assert (row["starved_p99_ms"], row["starved_s"]) == (3.96, 0.004)
    assert (row["worker_starved_p99_ms"], row["worker_starved_s"]) == (3.965, 0.0045)


def test_drops_name_process_and_stage(path: Path) -> None:
    with Store.open(path, "write") as store:
        append_process(store, 1, kind="core", engine_id="P")
        lost = {"process": [1, 1], "stage": ["step.started", ""], "lost_records": [5, 2]}
        store.append("loss", pa.table(lost))

    rows = ask(path, "drops")

    assert [(r["process"], r["engine"], r["stage"], r["lost_records"]) for r in rows] == [
        (1, "P", "step.started", 5),
        (1, "P", "", 2),
    ]


def test_engines_and_processes(path: Path) -> None:
    """A request that D served alone is no failure of it, and limits are those of the process started last."""
    sample = Sample()
    for name, verdict in (("r1", "complete"), ("r2", "no handoff"), ("r3", "recomputed")):
        sample.add(name, PATH, (), verdict=verdict)
    sample.write(path)
    with Store.open(path, "write") as store:
        append_process(store, 1, pid=1, kind="core", engine_id="P0", role="kv_producer")
        append_process(store, 2, pid=2, kind="router")
        append_events(
            store, (1, "step.scheduled", 1, "", "", 1, 1, 1, 0), (2, "router.received", 1, "r", "", 0, 0, 0, 0)
        )
        engine = store.rows("SELECT prefill_engine FROM request LIMIT 1")[0]["prefill_engine"]
        append_process(
            store, 3, pid=3, kind="core", engine_id=engine, role="kv_producer", max_num_seqs="16", kv_blocks="900"
        )

        append_process(store, 4, pid=4, kind="core", engine_id="P1", max_num_seqs="64", kv_blocks="900")
        append_process(store, 5, pid=5, kind="core", engine_id="P1", max_num_batched_tokens="2048", max_num_seqs="8")
        for process in (4, 5):
            store.execute(f"UPDATE process SET first_ns = {process} WHERE process = {process}")  # noqa: S608 -- ours

    found = {row["engine"]: row for row in ask(path, "engines")}

    assert (found[engine]["requests"], found[engine]["failed_requests"]) == (3, 1)
    limits = ("max_num_batched_tokens", "max_num_seqs", "kv_blocks")
    assert [[found[name][limit] for limit in limits] for name in (engine, "P0", "P1")] == [
        [None, 16, 900], [None] * 3, [2048, 8, None],
    ]  # fmt: skip
    assert [(r["process"], r["kind"], r["events"]) for r in ask(path, "processes")] == [
        (1, "core", 1), (2, "router", 1), (3, "core", 0), (4, "core", 0), (5, "core", 0),
    ]  # fmt: skip
