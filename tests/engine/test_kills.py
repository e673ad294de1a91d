"""SIGKILL under load: what was emitted is in the store, unfinished requests have a verdict, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtrace.lab import workload
from kvtrace.store import Store
from kvtrace.verdict import VERDICTS
from tests.engine import programs
from tests.engine.deployment import Deployment
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LOAD = {"requests": 30, "rate_qps": 8.0, "input_len": 200, "output_len": 16, "seed": 21, "quiet": True}
BEFORE = LOAD | {"requests": 5, "seed": 22}
"""What is served whole before something is killed, on however slow a machine."""
KILL_AFTER_S = 1.5
LOAD_TIMEOUT_S = 150
# Once for each request, on whichever side the mode has it.
ONCE = (
    "router.received", "router.decided", "router.first_token", "router.done",
    "prefill.http_received", "prefill.enqueued", "prefill.allocated", "prefill.finished",
    "decode.http_received", "decode.enqueued", "decode.allocated", "decode.ready", "decode.first_token_out",
    "transfer.prepared", "transfer.post_ended", "transfer.done",
)  # fmt: skip


@contextmanager
def load_on(url: str) -> Iterator[Future[workload.Result]]:
    """Send the load beside the block; return when both are over."""
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(workload.run, url, **LOAD)
        yield load
        load.result(timeout=LOAD_TIMEOUT_S)


def rows(store: Path, sql: str, **values: Any) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    with Store.open(store, "read") as opened:
        return opened.rows(sql, values)


def holds_a_request(store: Path) -> bool:
    """Return whether a published store knows any request yet."""
    return store.exists() and bool(rows(store, "FROM request LIMIT 1"))


def known(store: Path, result: workload.Result) -> dict[str, dict[str, Any]]:
    """Return the load's requests that the store knows, by the client's ids, after `explain` has shown them all."""
    ids = {record.client_request_id for record in result.records}
    found = [request for request in programs.explained(store) if request["client_request_id"] in ids]
    by_id = {request["client_request_id"]: request for request in found}
    assert len(by_id) == len(found)
    for request in found:
        assert request["verdict"] in VERDICTS
        if request["ttft_ns"] is not None:
            programs.assert_exact(request)
    for record in result.completed:
        assert by_id[record.client_request_id]["verdict"] == "complete"
    return by_id


def assert_first_tokens_are_known(result: workload.Result, found: dict[str, dict[str, Any]], until_ns: int) -> None:
    """Check that every first token that reached the client before the kill is in the store."""
    for record in result.records:
        if record.ttft_ns is not None and record.start_ns + record.ttft_ns < until_ns:
            assert found[record.client_request_id]["ttft_ns"] is not None


@pytest.mark.parametrize("mode", ["push"])
def test_killed_recorder_is_started_again_and_nothing_comes_twice(deployment: Deployment, tmp_path: Path) -> None:
    """Killed amid the load and started again: each event is in the store once."""
    store = tmp_path / "run.duckdb"
    with ThreadPoolExecutor(1) as pool:
        with programs.following(store, deployment.spool) as recorder:
            workload.run(deployment.lab.url, **BEFORE)
            until(lambda: holds_a_request(store), what="a snapshot holds a request")
            load = pool.submit(workload.run, deployment.lab.url, **LOAD)
            time.sleep(KILL_AFTER_S)
            recorder.kill()
            recorder.wait()
            killed_ns = time.time_ns()
        assert programs.explained(store)  # what was published stays readable
        with programs.following(store, deployment.spool):
            result = load.result(timeout=LOAD_TIMEOUT_S)

    assert len(result.completed) == LOAD["requests"]
    found = known(store, result)
    assert {request["verdict"] for request in found.values()} == {"complete"}
    counts = rows(
        store,
        "SELECT stage::VARCHAR AS stage, count(*) AS events, "
        "count(DISTINCT regexp_extract(request, 'kvt-[0-9a-f]{32}')) AS requests FROM event "
        "WHERE list_contains($ids, regexp_extract(request, 'kvt-[0-9a-f]{32}')) GROUP BY 1",
        ids=[request["request_id"] for request in found.values()],
    )
    by_stage = {row["stage"]: (row["events"], row["requests"]) for row in counts}
    assert {stage: by_stage[stage] for stage in ONCE} == dict.fromkeys(ONCE, (LOAD["requests"], LOAD["requests"]))
    (same,) = rows(
        store, "SELECT count(*) AS events, (SELECT count(*) FROM (SELECT DISTINCT * FROM event)) AS others FROM event"
    )
    assert same["events"] == same["others"]
    (series,) = rows(store, "SELECT count(*) AS processes, count(DISTINCT series) AS series FROM process")
    assert series["processes"] == series["series"]
    (sides,) = rows(
        store,
        "SELECT count(*) FILTER (WHERE t_ns < $t) AS before, count(*) FILTER (WHERE t_ns > $t) AS after FROM event",
        t=killed_ns,
    )
    assert sides["before"] > 100
    assert sides["after"] > 100


@pytest.mark.parametrize("mode", ["pull"])
def test_killed_router_leaves_verdicts_and_its_successor_serves(deployment: Deployment, tmp_path: Path) -> None:
    """What the router had received has a verdict; after its restart requests are served and explained again."""
    store = tmp_path / "run.duckdb"
    with programs.following(store, deployment.spool):
        before = workload.run(deployment.lab.url, **BEFORE)
        with load_on(deployment.lab.url) as load:
            time.sleep(KILL_AFTER_S)
            os.kill(deployment.pid("router"), signal.SIGKILL)
            killed_ns = time.monotonic_ns()
        result = load.result()
        deployment.lab.restart("router")
        after = workload.run(deployment.lab.url, **BEFORE)
    found = known(store, result)

    assert len(result.completed) < LOAD["requests"]
    assert_first_tokens_are_known(result, found, killed_ns)
    assert any(request["verdict"] != "complete" for request in found.values())
    for served in (before, after):
        assert len(served.completed) == len(known(store, served)) == BEFORE["requests"]


@pytest.mark.parametrize(("mode", "role"), [("push", "decode"), ("pull", "prefill")])
def test_killed_engine_leaves_its_events_and_verdicts(spent_deployment: Deployment, role: str, tmp_path: Path) -> None:
    """All of D's or P's processes are killed at once: every request is known, and what the engine emitted is there."""
    lab = spent_deployment.lab
    (engine,) = (engine for engine in lab.engines if engine.role.value == role)
    store = tmp_path / "run.duckdb"
    assert lab.router is not None
    processes = programs.family(lab.router.pid).union(*(programs.family(one.pid) for one in lab.engines))
    with programs.following(store, spent_deployment.spool):
        before = workload.run(lab.url, **BEFORE)
        with load_on(lab.url) as load:
            time.sleep(KILL_AFTER_S)
            killed_unix_ns, killed_ns = time.time_ns(), time.monotonic_ns()
            os.killpg(engine.pid, signal.SIGKILL)
        result = load.result()
    found = known(store, result)
    lab.stop()

    assert len(before.completed) == len(known(store, before)) == BEFORE["requests"]
    assert len(result.completed) < LOAD["requests"]
    assert found.keys() == {record.client_request_id for record in result.records}
    assert_first_tokens_are_known(result, found, killed_ns)
    assert any(request["verdict"] != "complete" for request in found.values())
    last = rows(
        store,
        "SELECT facts['kind'] AS kind, max(t_ns) AS t_ns FROM event JOIN process USING (process) "
        "WHERE facts['engine_id'] = $id GROUP BY 1",
        id=engine.engine_id,
    )
    assert {row["kind"] for row in last} == {"api", "core", "worker"}
    for row in last:
        assert 0 < killed_unix_ns + 1e9 - row["t_ns"] < 6e9, row["kind"]
    assert len(processes) >= 7  # API server, core and worker of each engine, and the router
    assert not programs.alive(processes)
