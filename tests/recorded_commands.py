"""Commands that `kvtrace record` is tried with, and what it left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtrace.store import Store
from tests.waiting import LONG_S

# Emits a router's three points for N requests, SECONDS apart, and ends with CODE; the last once the file GO is there.
EMITTER = """
import os, sys, time
from kvtrace import emit, stages
count, pause_s, code = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
tracer = emit.tracer()
for number in range(count):
    while number == count - 1 and sys.argv[4:] and not os.path.exists(sys.argv[4]):
        time.sleep(0.02)
    for stage in (stages.ROUTER_RECEIVED, stages.ROUTER_FIRST_TOKEN, stages.ROUTER_DONE):
        tracer.emit(stage.code, f"kvt-{number:032x}", 200)
    print(number, flush=True)
    time.sleep(pause_s)
sys.exit(code)
"""


def written_emitter(folder: Path) -> list[str]:
    """Return the command of the emitter, a program of that folder."""
    script = folder / "emitter.py"
    script.write_text(EMITTER)
    return [sys.executable, str(script)]


def program(*arguments: str | Path) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import sys; from kvtrace.cli import main; sys.exit(main())",
        "record",
        *map(str, arguments),
    ]


def run(*arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(program(*arguments), capture_output=True, text=True, check=False, timeout=LONG_S, **more)


def start(*arguments: str | Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(program(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def answer(path: Path, sql: str) -> Any:
    with Store.open(path, "read") as store:
        return next(iter(store.rows(sql)[0].values()))


def events(path: Path) -> int:
    return int(answer(path, "SELECT count(*) FROM event WHERE stage::VARCHAR LIKE 'router.%'"))


def spool_of(said: str) -> Path:
    """Return the folder that a recorder follows, from what it says at its start; others record at the same time."""
    return Path(said.split("`")[1].rsplit(" --spool ")[1])
