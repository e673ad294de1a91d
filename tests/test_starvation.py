"""How long a thread had no processor: read from the kernel's own file, a real one and made-up ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from instrumented_connectors.starvation import Starvation

REAL = Path("/proc/thread-self/schedstat")
_SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
_COUNT = """
import os, sys, time
from instrumented_connectors.starvation import Starvation
os.sched_setaffinity(0, {int(sys.argv[1])})
kernel = Starvation()
def over(until_s):
    before, begin_s = kernel.starved_ns(), time.monotonic()
    while time.monotonic() - begin_s < until_s: pass
    print(kernel.starved_ns() - before, flush=True)
over(0.5)
sys.stdin.readline()
before = kernel.starved_ns()
print("ready", flush=True)
time.sleep(0.4)  # who sleeps or is stopped wants no processor
print(kernel.starved_ns() - before, flush=True)
"""


@pytest.mark.skipif(not REAL.exists(), reason="the kernel does not count it")
def test_who_shares_a_processor_waits_for_it_and_who_sleeps_or_is_stopped_does_not() -> None:
    """Half a second beside a thread that spins: a tenth of it at least without the processor; asleep, next to none."""
    cpu = str(min(os.sched_getaffinity(0)))
    spinning = subprocess.Popen([sys.executable, "-c", _SPIN, cpu])
    counting = subprocess.Popen(
        [sys.executable, "-c", _COUNT, cpu], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert counting.stdin is not None
    assert counting.stdout is not None
    try:
        beside_ns = int(counting.stdout.readline())
        spinning.kill()
        counting.stdin.write("\n")
        assert counting.stdout.readline() == "ready\n"
        os.kill(counting.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(counting.pid, signal.SIGCONT)
        stopped_ns = int(counting.stdout.readline())
    finally:
        for process in (spinning, counting):
            process.kill()
            process.communicate()

    assert beside_ns > 50_000_000
    assert stopped_ns < 150_000_000


@pytest.mark.parametrize("line", ["", "7", "seven eight nine", None])
def test_a_kernel_that_does_not_say_counts_nothing(tmp_path: Path, line: str | None) -> None:
    path = tmp_path / "schedstat"
    if line is not None:
        path.write_text(line)

    kernel = Starvation(str(path))

    assert [kernel.starved_ns(), kernel.starved_ns()] == [0, 0]


def test_a_forked_child_reads_its_own(tmp_path: Path) -> None:
    """And not its parent's, whose file it inherits open."""
    path = tmp_path / "schedstat"
    path.write_text("1 2000 3")
    kernel = Starvation(str(path))
    assert kernel.starved_ns() == 2000
    path.unlink()
    path.write_text("1 3000 3")
    assert kernel.starved_ns() == 2000  # the file that was opened

    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(kernel.starved_ns()).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert os.read(read, 16) == b"3000"
    os.close(read)
    os.close(write)


@pytest.mark.skipif(not REAL.exists(), reason="the kernel does not count it")
def test_a_thread_can_be_asked_about_by_another() -> None:
    own, asked = Starvation(), Starvation(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    found = [own.starved_ns()]
    other = threading.Thread(target=lambda: found.append(asked.starved_ns()))
    other.start()
    other.join()
    found.append(own.starved_ns())

    assert found == sorted(found)
    assert found[0] > 0


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    path.write_text("1 2000 3")
    before = len(os.listdir("/proc/self/fd"))
    kernel = Starvation(str(path))
    kernel.starved_ns()
    kernel.close()

    assert len(os.listdir("/proc/self/fd")) == before
