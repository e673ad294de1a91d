"""Switches profiles on and off in a lab's running processes, for `tests/bench_profiles.py`: on their PYTHONPATH.

A file named by KVTRACE_BENCH_SWITCH holds samples a second, 0 for none; every process does as it says within 0.1 s.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

VARIABLE = "KVTRACE_BENCH_SWITCH"
_EVERY_S = 0.1


class _Nobody:
    """Facts that were stated before."""

    def fact(self, name: str, value: str) -> None:
        """Forget it."""


def _follow() -> None:
    """Bring the process's profiler to what the file says, once the process has begun to profile itself."""
    present = ""
    while True:
        time.sleep(_EVERY_S)
        profiler = sys.modules.get("kvtrace.profiler")
        if profiler is None or not profiler._state.labels:
            continue
        wanted = Path(os.environ[VARIABLE]).read_text().strip()
        if wanted == present:
            continue
        present, labels = wanted, profiler._state.labels
        profiler.stop()
        if wanted != "0":
            os.environ[profiler.RATE_VARIABLE] = wanted
            profiler.start(labels, _Nobody())


def _begin() -> None:
    threading.Thread(target=_follow, daemon=True, name="switch").start()


if os.environ.get(VARIABLE):
    os.register_at_fork(after_in_child=_begin)
    _begin()
