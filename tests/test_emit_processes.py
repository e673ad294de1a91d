"""The emit side through what processes go through: killed, forked, stopped, interrupted between two bytecodes."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from kvtrace import stages
from tests import spooled

if TYPE_CHECKING:
    from pathlib import Path

ENQUEUED = stages.PREFILL_ENQUEUED.code
FINISHED = stages.PREFILL_FINISHED.code


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "pass"])
def test_no_end_loses_what_emit_returned_from(tmp_path: Path, end: str) -> None:
    count = 50_000
    process = spooled.start(
        f"""
import os, signal
for n in range({count}):
    tracer.emit({ENQUEUED}, f"r{{n // 25}}", n)
    if n % 2000 == 0:
        tracer.flush()  # else, where the spool's thread gets no processor, some are dropped and counted
{end}
""",
        tmp_path,
    )
    process.communicate(timeout=120)

    found = spooled.read(tmp_path)
    assert [event.numbers[0] for event in found.of(ENQUEUED)] == list(range(count))
    assert found.dropped == {}


def test_a_forked_child_writes_files_of_its_own(tmp_path: Path) -> None:
    out = spooled.run(
        f"""
import os
tracer.fact("kind", "core")
tracer.emit({ENQUEUED}, "parent", os.getpid())
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)  # never emits: opens no file
    tracer.emit({ENQUEUED}, "child", os.getpid())
    tracer.emit({ENQUEUED}, "child", os.getpid())
    os._exit(0)
os.wait()
tracer.emit({ENQUEUED}, "parent", os.getpid())
print(os.getpid())
""",
        tmp_path,
    )

    names = {path: path.name.rsplit("-", 2)[0].rsplit("-", 1)[1] for path in tmp_path.glob("*.kvt")}
    assert len(set(names.values())) == 2
    for path, pid in names.items():
        read = spooled.read([path])
        events = read.of(ENQUEUED)
        assert not events or read.facts["kind"] == "core"  # a child may end while its thread makes the next file
        assert {event.request for event in events} <= {"parent" if pid == out.strip() else "child"}
        assert {str(event.numbers[0]) for event in events} <= {pid}
    found = spooled.read(tmp_path)
    assert sorted(event.request for event in found.of(ENQUEUED)) == ["child", "child", "parent", "parent"]


def test_a_stopped_process_goes_on_where_it_was(tmp_path: Path) -> None:
    process = spooled.start(
        f"""
import time
for n in range(300):
    tracer.emit({ENQUEUED}, "r", n)
    if n == 50:
        print("begun", flush=True)
    time.sleep(0.001)
""",
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=120)

    found = spooled.read(tmp_path)
    assert [event.numbers[0] for event in found.of(ENQUEUED)] == list(range(300))
    assert found.unfinished == 0


def test_signals_inside_emit_do_no_harm(tmp_path: Path) -> None:
    """A handler that emits runs between two bytecodes of the emit() that it interrupts."""
    spooled.run(
        f"""
import itertools, signal
beats = itertools.count()
def handler(*_):
    tracer.emit({FINISHED}, "handler", next(beats))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
for n in range(100_000): tracer.emit({ENQUEUED}, f"r{{n // 25}}", n)
signal.setitimer(signal.ITIMER_REAL, 0)
""",
        tmp_path,
    )

    found = spooled.read(tmp_path)
    assert len(found.of(ENQUEUED)) + found.dropped.get(ENQUEUED, 0) == 100_000
    beats = [event.numbers[0] for event in found.of(FINISHED)]
    assert sorted(beats) == list(range(len(beats)))
    assert len(beats) > 10
