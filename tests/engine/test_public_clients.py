"""A public load generator and a public router over the lab's engines, recorded by `kvtrace record --spool`."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtrace.lab import ports, workload
from kvtrace.store import Store
from tests.engine import programs
from tests.engine.deployment import Deployment
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timing, pytest.mark.timeout(300)]

REQUESTS = 30
RATE_QPS = 3
UUID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}")
CLIENT_PATH_MS = 4.0
"""What a client on the same two cores may spend on its own path to the router and back, at the median."""


def began_since(store: Path, t_ns: int) -> list[dict[str, Any]]:
    """Return the requests that began after a time."""
    with Store.open(store, "read") as opened:
        return opened.rows("SELECT * FROM request WHERE start_ns >= $t ORDER BY start_ns", {"t": t_ns})


def aiperf(deployment: Deployment, folder: Path) -> dict[str, float]:
    """Send a load by aiperf; return the TTFT that it measured by the X-Request-Id that it sent, ms."""
    command = [
        programs.public_client("aiperf"), "profile",
        "--model", deployment.lab.model, "--tokenizer", str(deployment.lab.model_dir),
        "--url", deployment.lab.url, "--endpoint-type", "completions", "--streaming",
        "--request-count", str(REQUESTS), "--request-rate", str(RATE_QPS), "--random-seed", "4",
        "--isl", "100", "--prompt-input-tokens-stddev", "0", "--osl", "8", "--osl-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder),
        "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    lines = [json.loads(line) for line in next(folder.rglob("profile_export.jsonl")).read_text().splitlines()]
    assert not any(line.get("error") for line in lines)
    measured = {line["metadata"]["x_request_id"]: line["metrics"]["time_to_first_token"] for line in lines}
    assert {ttft["unit"] for ttft in measured.values()} == {"ms"}
    return {identity: ttft["value"] for identity, ttft in measured.items()}


@pytest.mark.parametrize("mode", ["push"])
def test_aiperf_counts_and_measures_the_same_requests(deployment: Deployment, tmp_path: Path) -> None:
    """Its count is the store's, every request is explained, and its TTFT is the router's and the client's path."""
    store = tmp_path / "run.duckdb"
    began_ns = time.time_ns()
    with programs.following(store, deployment.spool):
        measured = aiperf(deployment, tmp_path / "aiperf")
    found = programs.of_client(programs.explained(store), measured)

    assert len(measured) == len(began_since(store, began_ns)) == REQUESTS
    for request in found.values():
        assert (request["verdict"], request["scope"], request["mode"]) == ("complete", "router", "push")
        programs.assert_exact(request)
    differences = [ttft_ms - found[identity]["ttft_ns"] / 1e6 for identity, ttft_ms in measured.items()]
    assert 0 <= statistics.median(differences) <= CLIENT_PATH_MS


@contextmanager
def vllm_router(deployment: Deployment, log: Path) -> Iterator[str]:
    """Run vllm-router in front of the lab's engines; return its address."""
    port, prometheus_port = ports.take(), ports.take()
    sides = [part for engine in deployment.lab.engines for part in (f"--{engine.role.value}", engine.url)]
    command = [
        programs.public_client("vllm-router"), "--vllm-pd-disaggregation", *sides, "--kv-connector", "nixl",
        "--host", ports.HOST, "--port", str(port), "--prometheus-port", str(prometheus_port),
    ]  # fmt: skip
    url = f"http://{ports.HOST}:{port}"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: answers(url), what=f"vllm-router answers ({log})")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Return whether a server says that it is healthy."""
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("mode", ["pull"])
def test_vllm_router_in_front_is_explained_from_the_engines_on(deployment: Deployment, tmp_path: Path) -> None:
    """Without a router point the scope is the engines', and both legs meet under the id that vllm-router gave."""
    store = tmp_path / "run.duckdb"
    with programs.following(store, deployment.spool), vllm_router(deployment, tmp_path / "vllm-router.log") as url:
        began_ns = time.time_ns()
        load = workload.run(url, quiet=True, requests=REQUESTS, rate_qps=RATE_QPS, input_len=300, output_len=8, seed=31)
    explained = {request["request_id"]: request for request in programs.explained(store)}
    found = began_since(store, began_ns)

    assert len(load.completed) == len(found) == len({UUID.findall(row["request_id"])[-1] for row in found}) == REQUESTS
    engines = {engine.role.value: engine.engine_id for engine in deployment.lab.engines}
    for row in found:
        assert (row["verdict"], row["scope"], row["mode"]) == ("complete", "engine", "pull"), row["note"]
        assert (row["prefill_engine"], row["decode_engine"]) == (engines["prefill"], engines["decode"])
        programs.assert_exact(explained[row["request_id"]])
    ttft_ms = [row["ttft_ns"] / 1e6 for row in found]
    client_ms = [(record.ttft_ns or 0) / 1e6 for record in load.records]
    assert 0 < statistics.median(client_ms) - statistics.median(ttft_ms) < 30
