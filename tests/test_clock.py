"""Clocks and what identifies a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from kvtrace import clock


def test_an_anchor_lies_between_the_clocks_around_it() -> None:
    monotonic_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    anchor = clock.read_anchor()

    assert monotonic_ns <= anchor.monotonic_ns <= time.monotonic_ns()
    assert wall_ns <= anchor.wall_ns <= time.time_ns()
    assert 0 <= anchor.uncertainty_ns < 1_000_000_000


def test_two_processes_of_a_host_share_the_clock_domain() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", "from kvtrace import clock; print(clock.domain())"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert printed.stdout.strip() == clock.domain()
    assert clock.domain() == f"{clock.boot_id()}/{clock.time_namespace()}"


def test_a_process_is_known_by_its_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        began = clock.process_start_ticks(process.pid)
        started_ns = clock.process_start_wall_ns(process.pid)

        assert began >= clock.process_start_ticks(os.getpid()) > 0
        assert abs(time.time_ns() - started_ns) < 60_000_000_000
    finally:
        process.kill()
    while (state := clock.process_start_ticks(process.pid)) and state == began:
        time.sleep(0.01)

    assert clock.process_start_ticks(process.pid) == 0, "a zombie writes nothing more"
    process.wait()
    assert clock.process_start_ticks(process.pid) == 0


def test_a_process_that_never_was_has_no_start() -> None:
    assert clock.process_start_ticks(2**22 + 1) == 0
    assert clock.process_start_wall_ns(2**22 + 1) == 0
