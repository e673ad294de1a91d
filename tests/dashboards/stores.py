"""Stores for the dashboards' tests: a small one in which every panel has something to show, and an empty one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from kvtrace.findings import table
from kvtrace.store import Store
from tests.moulds import cast
from tests.sample_store import MS, PUSH_PATH, START_NS, Sample, scaled
from tests.test_queries_of_engines import at, steps, transfer
from tests.test_schema import append_events, append_process

if TYPE_CHECKING:
    from pathlib import Path

FROM_MS = START_NS // MS
TO_MS = FROM_MS + 10_000
HELD = {
    "held_blocks": 38, "held_ns": 40 * MS, "held_after_end_ns": 2_000 * MS, "reserved_blocks": 38,
    "reserved_ns": 30 * MS,
}  # fmt: skip
CHECKED = {"checked_blocks": 38, "corrupt_blocks": 0, "unchecked_blocks": 0}


def write_full(path: Path) -> Path:
    """Write eight requests a second apart, by push and by pull, one of them failed, with events of both engines."""
    return cast(path, "full", _make_full)


def _make_full(path: Path) -> None:
    profiled = {"profiles": "on", "profiles.url": "http://pyroscope:4040"}
    sample = Sample(facts={"model": "tiny", "recorder.state": "finished", "recorder.lag_ms": "120", **profiled})
    for number in range(6):
        values = {
            "client_request_id": f"client-{number}",
            "registration_late_ns": (number - 3) * 10 * MS,
            **HELD,
            **CHECKED,
        }
        path_of = scaled(1 + number % 3)
        sample.add(f"push-{number}", path_of, start_ms=1000 * number, prompt_tokens=300 << number % 3, **values)
    sample.add("pull-0", PUSH_PATH, start_ms=6000, mode="pull", registration_late_ns=None, **HELD)
    sample.add("failed-0", (), start_ms=7000, verdict="failed")
    sample.add_pace("push-0", (("decode.token", "compute.run", 40),), (10, 10, 10, 10))
    parts = (("decode.token", "compute.run", 40), ("step.connector", "coordination", 20))
    sample.add_pace("push-1", parts, (30, 30), **{"push-0": 15})
    sample.write(path)
    with Store.open(path, "write") as store:
        append_process(store, 1, pid=1, kind="core", engine_id="p0", role="kv_producer", model="tiny")
        append_process(store, 2, pid=2, kind="core", engine_id="d0", role="kv_consumer", model="tiny")
        append_events(
            store,
            *transfer(7, 0, 10, 11, 14),
            *transfer(8, 1, 10, 12, 18),
            *steps(1, 0, 2000),
            *steps(2, 100, 120, 140, 3000),
            *at(
                (1, "prefill.enqueued", 0, "p-1", "", 600, 0, 0, 0),
                (1, "prefill.scheduled", 500, "p-1", "", 1, 600, 0, 600),
                (2, "decode.enqueued", 0, "d-1", "", 600, 0, 1, 0),
                (2, "decode.allocated", 250, "d-1", "", 38, 599, 0, 0),
                (2, "decode.ready", 1250, "d-1", "", 0, 0, 0, 0),
                (2, "decode.scheduled", 1500, "d-1", "", 9, 1, 599, 600),
                (2, "handshake.started", 0, "", "p0", 0, 0, 0, 0),
                (2, "handshake.ended", 30, "", "p0", 0, 1, 0, 0),
                (1, "thread.placed", 0, "", "", 3, 1, 2, 12),
                (1, "prefill.lease_started", 0, "p-1", "", 0, 30_000 * MS, 0, 0),
                (1, "transfer.failed", 5, "p-9", "NIXL_ERR", 9, 0, 0, 0),
            ),
        )
        lost = {"process": [1], "stage": ["step.started"], "lost_records": [5]}
        store.append("loss", pa.table(lost))
        store.append("recorder", pa.table({"at_ns": [START_NS], "subject": ["x"], "message": ["is cut short"]}))
        table.write(store)


def write_empty(path: Path) -> Path:
    """Write a store without rows."""
    Store.open(path, "write").close()
    return path
