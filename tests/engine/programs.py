"""kvtrace's commands as users run them beside a lab, with time limits, and what their stores say."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.waiting import until

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients"
SHARES = ("compute_ns", "coordination_ns", "transfer_ns", "unattributed_ns")


def kvtrace(*arguments: str | Path) -> list[str]:
    """Return the command line of a kvtrace command."""
    return [sys.executable, "-m", "kvtrace", *map(str, arguments)]


def public_client(name: str) -> str:
    """Return the path of a program in the environment of public clients; fail where it has not been made."""
    path = CLIENTS / "bin" / name
    assert path.exists(), f"{path} is missing: make {CLIENTS.name}/stamp"
    return str(path)


def run(command: Sequence[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Return the ended command, which has neither failed nor hung."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert ended.returncode == 0, f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}"
    return ended


@contextmanager
def following(store: Path, spool: Path, *options: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Let `kvtrace record --spool` follow a folder while the block runs, then interrupt it and wait for its end.

    What it says goes into a file beside the store, `.log` in the place of its suffix.
    """
    log = store.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            kvtrace("record", "-o", store, "--spool", spool, *options), stdout=output, stderr=output, text=True
        )
    try:
        until(lambda: "recording into" in log.read_text(), what=f"{log} says that it records")
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def explained(store: Path, timeout_s: float = 60) -> list[dict[str, Any]]:
    """Return the requests of `kvtrace explain --json`, after `kvtrace explain` for people has worked too."""
    assert "TTFT" in run(kvtrace("explain", store), timeout_s).stdout
    document = json.loads(run(kvtrace("explain", store, "--json"), timeout_s).stdout)
    assert document["schema"] == 1
    requests: list[dict[str, Any]] = document["requests"]
    return requests


def of_client(requests: Iterable[dict[str, Any]], ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the requests of a client by the client's ids, each of which occurs once."""
    wanted = set(ids)
    found = [request for request in requests if request["client_request_id"] in wanted]
    by_id = {request["client_request_id"]: request for request in found}
    assert len(by_id) == len(found), "a client's id occurs twice"
    assert by_id.keys() == wanted, f"not in the store: {sorted(wanted - by_id.keys())[:3]}"
    return by_id


def assert_exact(request: dict[str, Any]) -> None:
    """Check that the shares of a request with a first token add up to the nanosecond and its segments tile it."""
    assert sum(request[share] for share in SHARES) == request["ttft_ns"]
    assert request["compute_run_ns"] + request["compute_queue_ns"] == request["compute_ns"]
    segments = request["segments"]
    assert sum(segment["end_ns"] - segment["start_ns"] for segment in segments) == request["ttft_ns"]
    assert all(one["end_ns"] == other["start_ns"] for one, other in itertools.pairwise(segments))


def family(pid: int) -> set[int]:
    """Return the ids of a process and all that descends from it."""
    found = {pid}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            found |= {one for child in (thread / "children").read_text().split() for one in family(int(child))}
    return found


def alive(pids: Iterable[int]) -> set[int]:
    """Return which of the processes still run; those that wait to be reaped do not."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}:
                found.add(pid)
    return found
