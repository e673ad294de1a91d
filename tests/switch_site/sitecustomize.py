"""Switches tracing off and on in a lab's running processes, for `tests/bench_switched.py`: on their PYTHONPATH.

The file named by KVTRACE_BENCH_SWITCH holds one byte, 1 for on and 0 for off; every process does as it says in 10 ms.
Off, hooks stay where they are and see that tracing is off, as they do after an error of tracing's own.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time

VARIABLE = "KVTRACE_BENCH_SWITCH"
_EVERY_S = 0.01


def _follow() -> None:
    """Bring the process's emitter to what the file says, once there is one."""
    with open(os.environ[VARIABLE], "rb") as file:
        switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)  # looked at so often that a read would cost
    present, emit = 1, None
    while True:
        time.sleep(_EVERY_S)
        wanted = switch[0]
        if wanted == present:
            continue
        module = sys.modules.get("kvtrace.emit")
        tracer = getattr(module, "_tracer", None)
        if tracer is None:
            continue
        present = wanted
        emit = emit or module.Emitter.emit
        tracer.enabled = bool(wanted)
        module.Emitter.emit = emit if wanted else module.NullEmitter.emit


def _begin() -> None:
    threading.Thread(target=_follow, daemon=True, name="switch").start()


if os.environ.get(VARIABLE):
    os.register_at_fork(after_in_child=_begin)
    _begin()
