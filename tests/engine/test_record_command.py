"""`kvtrace record -- COMMAND` over real engines: every process below it is recorded, and the user changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtrace.lab import model
from kvtrace.lab.engine import Engine, EngineOptions, Role, describe
from kvtrace.store import Store
from tests.engine import programs, sites
from tests.engine.conftest import Deployments
from tests.engine.deployment import SMALL_CACHE
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Starts the engine that it is given as its child, asks it once, ends it, and ends with a code of its own.
SCRIPT = """
import json, subprocess, sys, time, urllib.request
url, *command = sys.argv[1:]
server = subprocess.Popen(command)
while server.poll() is None:
    try:
        urllib.request.urlopen(url + "/health", timeout=2).close()
        break
    except OSError:
        time.sleep(0.2)
body = json.dumps({"model": "kvtrace-tiny", "prompt": [5] * 100, "max_tokens": 4}).encode()
request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["usage"]["completion_tokens"], flush=True)
server.terminate()
server.wait()
sys.exit(7)
"""


@dataclass
class Recorded:
    """A recorder that runs a command, and the engine below it."""

    engine: Engine
    store: Path
    log: Path
    process: subprocess.Popen[str]

    def kinds(self) -> dict[str, int]:
        """Return how many events each kind of process has emitted about requests and steps."""
        return {
            row["kind"]: row["events"]
            for row in self.rows(
                "SELECT facts['kind'] AS kind, count(*) AS events FROM event JOIN process USING (process) "
                "WHERE stage::VARCHAR NOT LIKE 'clock.%' GROUP BY 1"
            )
        }

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query."""
        with Store.open(self.store, "read") as opened:
            return opened.rows(sql, {})


def start(name: str, folder: Path, number: int, *before: str, path: str = "") -> Recorded:
    """Start recording one of vLLM's own command lines, without any flag of kvtrace's, behind the given words.

    `path` is the PYTHONPATH that the user has set.
    """
    options = EngineOptions("pull", instrumented=False, arguments=SMALL_CACHE)
    engine = describe(Role.DECODE, number, options, folder, model.build(), {})
    store, log = folder / f"{name}.duckdb", folder / f"{name}.log"
    words = [word.replace("URL", engine.url) for word in before]
    assert not any("instrumented" in word for word in engine.command)
    with log.open("w") as output:
        process = subprocess.Popen(
            programs.kvtrace("record", "-o", store, "--", *words, *engine.command),
            env={**os.environ, **engine.program.environment, **({"PYTHONPATH": path} if path else {})},
            stdout=output,
            stderr=output,
            text=True,
        )
    return Recorded(engine, store, log, process)


def test_every_process_below_a_command_is_recorded(deployments: Deployments, tmp_path: Path) -> None:
    """A script that starts an engine, and an engine started directly, at the same time: two cores carry two.

    The processes of the first fork, those of the second are spawned.
    """
    deployments.close()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    by_script = start("script", tmp_path, 0, sys.executable, str(script), "URL", path=sites.paths("start_site"))
    direct = start("direct", tmp_path, 1)
    try:
        check_direct(direct)
        check_script(by_script)
    finally:
        for one in (by_script, direct):
            if one.process.poll() is None:
                one.process.terminate()
                one.process.wait(timeout=60)


def check_direct(direct: Recorded) -> None:
    """Check that a server gets its middleware, a SIGTERM reaches it, and its exit code comes back."""
    until(lambda: healthy(direct), 150, f"the engine answers ({direct.log})")
    body = {"model": model.NAME, "prompt": [7] * 100, "max_tokens": 4}
    reply = httpx.post(f"{direct.engine.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.json()["usage"]["completion_tokens"] == 4
    said = direct.log.read_text()
    assert all(f"NixlPullConnector ({side}) is traced; events go to /" in said for side in ("scheduler", "worker"))
    time.sleep(0.2)
    processes = programs.family(direct.process.pid)
    direct.process.send_signal(signal.SIGTERM)
    assert direct.process.wait(timeout=60) in {0, 128 + signal.SIGTERM}
    assert len(processes) >= 4  # recorder, API server, core, worker
    assert not programs.alive(processes)

    assert direct.kinds().keys() == {"api", "core", "worker"}
    assert all(direct.kinds().values())
    (request,) = direct.rows("SELECT * FROM request")
    assert (request["verdict"], request["scope"], request["prompt_tokens"]) == ("no handoff", "engine", 100)
    assert request["ttft_ns"] > 0


def check_script(by_script: Recorded) -> None:
    """Check that an engine below a script is recorded, and that the script's exit code comes back."""
    assert by_script.process.wait(timeout=150) == 7, by_script.log.read_text()[-2000:]
    assert "\n4\n" in "\n" + by_script.log.read_text()
    kinds = by_script.kinds()
    assert {"core", "worker"} <= kinds.keys()
    assert len(by_script.rows("SELECT * FROM request")) == 1


def healthy(direct: Recorded) -> bool:
    """Return whether the engine answers its health check; fail where it has ended."""
    assert direct.process.poll() is None, direct.log.read_text()[-2000:]
    try:
        return httpx.get(f"{direct.engine.url}/health", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False
