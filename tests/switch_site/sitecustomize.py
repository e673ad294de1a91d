"""Switches tracing off and on in a lab's running processes, for `tests/bench_switched.py`: on their PYTHONPATH.

The file named by KVTRACE_BENCH_SWITCH holds "on" or "off"; every process does as it says within 0.1 s. Off, hooks stay
where they are and see that tracing is off, as they do after an error of tracing's own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

VARIABLE = "KVTRACE_BENCH_SWITCH"
_EVERY_S = 0.1


def _follow() -> None:
    """Bring the process's emitter to what the file says, once there is one."""
    present, emit = "on", None
    while True:
        time.sleep(_EVERY_S)
        module = sys.modules.get("kvtrace.emit")
        tracer = getattr(module, "_tracer", None)
        wanted = Path(os.environ[VARIABLE]).read_text().strip()
        if tracer is None or wanted == present or wanted not in {"on", "off"}:
            continue
        present = wanted
        emit = emit or module.Emitter.emit
        tracer.enabled = wanted == "on"
        module.Emitter.emit = emit if wanted == "on" else module.NullEmitter.emit


def _begin() -> None:
    threading.Thread(target=_follow, daemon=True, name="switch").start()


if os.environ.get(VARIABLE):
    os.register_at_fork(after_in_child=_begin)
    _begin()
