"""Who takes the forward threads' core shows as a wait for a processor; a process that is stopped waits for none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvtrace.store import Store
from tests.engine.deployment import Answer, Deployment, stop_for
from tests.engine.growth import Growth

pytestmark = [
    pytest.mark.engine, pytest.mark.timing, pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count it"),
]  # fmt: skip

PAIRS, BATCHES = 12, 3
NOISE_MS = 3.0
STOP_MS = 40.0
WAIT_LEAST_MS = 6.0
"""A forward of some 25 ms that has a third of its core waits for it twice as long as it takes."""
HOGS = 2
HOG_S = 20.0
"""A hog ends by itself after this, whatever becomes of the test."""
_HOG = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
until_s = time.monotonic() + float(sys.argv[2])
print("ready", flush=True)
while time.monotonic() < until_s: pass
"""


@contextmanager
def hogs(cpus: set[int]) -> Iterator[None]:
    """Keep these CPUs busy meanwhile, each from a session of its own: the kernel is fair between sessions."""
    spinning = [
        subprocess.Popen(
            [sys.executable, "-c", _HOG, str(cpu), str(HOG_S)], stdout=subprocess.PIPE, start_new_session=True
        )
        for cpu in [*cpus] * HOGS
    ]
    try:
        for one in spinning:
            assert one.stdout is not None
            assert one.stdout.readline()
        yield
    finally:
        for one in spinning:
            one.kill()
            one.communicate()


def waited_ms(answer: Answer) -> float:
    return answer.causes_ms.get("processor.wait", 0.0)


def until_told(
    deployment: Deployment, kinds: tuple[str, str], pair: Callable[[], None], off: Callable[..., str]
) -> None:
    """Send pairs until `off` has nothing to say of the second kind beside the first; fail if it has at last."""
    wrong = ""
    for _ in range(BATCHES):
        for _ in range(PAIRS):
            pair()
        answers = deployment.answers()
        wrong = off(*(answers[kind] for kind in kinds))
        if not wrong:
            return
    pytest.fail(wrong)


def grew(alone: list[Answer], beside: list[Answer], column: str) -> Growth:
    return Growth.of(beside, alone, lambda answer: answer.share_ms(column))


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_hog_on_the_forward_threads_core_is_a_wait_and_no_computing(deployment: Deployment, mode: str) -> None:
    """The connector pins both engines' forward threads to one core, on which something else spins now and then."""
    cpus = {cpu for side in ("prefill", "decode") for cpu in os.sched_getaffinity(deployment.pid(f"{side}.worker"))}

    def pair() -> None:
        deployment.send("alone")
        with hogs(cpus):
            deployment.send("beside")

    def off(alone: list[Answer], beside: list[Answer]) -> str:
        waited = Growth.of(beside, alone, waited_ms)
        forward = Growth.of(beside, alone, lambda answer: answer.causes_ms["prefill.forward"])
        computed, moved = grew(alone, beside, "compute_run"), grew(alone, beside, "transfer")
        kept = all(one.low_ms < NOISE_MS and one.median_ms < 2 * NOISE_MS for one in (forward, moved))
        if waited.median_ms >= WAIT_LEAST_MS and kept and computed.median_ms < waited.median_ms / 2:
            return ""
        return f"the wait grew by {waited}, P's forward by {forward}, compute_run by {computed}, transfer by {moved}"

    until_told(deployment, ("alone", "beside"), pair, off)
    with Store.open(deployment.record(), "read") as store:
        rows = store.rows("SELECT sum(forward_starved_ns) AS ns FROM step WHERE tokens > 0 GROUP BY engine")
    assert min(row["ns"] for row in rows) > 0


@pytest.mark.parametrize("mode", ["push"])
def test_a_stopped_worker_waits_for_no_processor(deployment: Deployment, mode: str) -> None:
    """For 40 ms at a time when P's forward runs: the request takes so much longer, and not for want of a processor."""
    worker = deployment.pid("prefill.worker")

    def pair() -> None:
        deployment.send("going")
        deployment.send("stopped", meanwhile=partial(stop_for, worker, STOP_MS / 1000, 0.015))

    def off(going: list[Answer], stopped: list[Answer]) -> str:
        waited, longer = Growth.of(stopped, going, waited_ms), grew(going, stopped, "ttft")
        # All threads of the worker go on at once, and want more cores than there are.
        if longer.median_ms >= STOP_MS / 2 and waited.median_ms < STOP_MS / 3:
            return ""
        return f"waits for a processor grew by {waited}, the time to first token by {longer}"

    until_told(deployment, ("going", "stopped"), pair, off)
