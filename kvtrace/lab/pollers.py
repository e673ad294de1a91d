"""Threads that poll without pause: found by what they use while the engines idle, and put behind everything else.

NIXL's progress thread polls its sockets with a time-out of zero, a whole core per worker even when nothing moves. On a
machine with a core to spare per rank that is the intention. A lab has two cores for two engines: there the pollers
take from every forward what they waste, so the lab lowers their priority. The engines themselves are untouched.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NICE = 10  # at 5 the median TTFT of push was 104 ms, at 10 it is 87 ms, at 19 single transfers starve (two cores)
# vLLM's own queues spin for one second after a message; a poller is what spins on.
IDLE_S = 1.2
SAMPLE_S = 0.5
LEAST_SHARE = 0.15  # of one core: two pollers on two busy cores still get more than this
_PROC = Path("/proc")
_TICKS_S = os.sysconf("SC_CLK_TCK")


def calm(pids: list[int]) -> list[int]:
    """Lower the priority of every thread of `pids` that polls on while idle; return the thread ids."""
    time.sleep(IDLE_S)
    before = _used_ticks(pids)
    time.sleep(SAMPLE_S)
    after = _used_ticks(pids)
    least_ticks = SAMPLE_S * _TICKS_S * LEAST_SHARE
    pollers = [thread for thread, ticks in after.items() if ticks - before.get(thread, ticks) > least_ticks]
    for thread in pollers:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
    return pollers


def _used_ticks(pids: list[int]) -> dict[int, int]:
    """Return the processor time of every thread but the first of each process, in clock ticks."""
    used: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):
            for task in (_PROC / str(pid) / "task").iterdir():
                if task.name != str(pid):
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                    used[int(task.name)] = int(fields[11]) + int(fields[12])
    return used
