"""Traces as running processes emit them: into spool files, each process with its facts and on the clock of now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from kvtrace import stages
from tests import spooled
from tests.trace import D_API, P_API, ROUTER, START_NS, D, P, Trace

if TYPE_CHECKING:
    from pathlib import Path

FACTS = {
    ROUTER: {"kind": "router"},
    P: {"kind": "core", "engine_id": "engine-p", "model": "tiny", "connector": "NixlPush"},
    D: {"kind": "core", "engine_id": "engine-d", "model": "tiny", "connector": "NixlPush"},
    P_API: {"kind": "api", "engine_id": "engine-p"},
    D_API: {"kind": "api", "engine_id": "engine-d"},
}


EMIT = """
import json, mmap, os, sys, time
from kvtrace import emit
given, children, begin_ns = json.load(open(sys.argv[1])), [], memoryview(mmap.mmap(-1, 8)).cast("q")
(ready, is_ready), (go, may_go) = os.pipe(), os.pipe()
for facts, events in given:
    if not (child := os.fork()):
        os.close(may_go)
        tracer = emit.tracer()
        for name, value in facts.items():
            tracer.fact(name, value)
        os.write(is_ready, b".")
        os.read(go, 1)
        for *event, t_ns in events:
            tracer.emit(*event, begin_ns[0] + t_ns)
        sys.exit(0)
    children.append(child)
for _ in given:
    os.read(ready, 1)
begin_ns[0] = time.monotonic_ns() - int(sys.argv[2])
os.close(may_go)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def emit(spool: Path, *traces: Trace, apart_ms: float = 0.0, ago_ms: float = 150.0) -> None:
    """Emit traces from a process each for the router, P, D and their servers; the first began `ago_ms` before.

    All at once and stamped when every process is ready, so that no request is long over before the last one emits.
    """
    events = [
        event._replace(t_ns=event.t_ns - START_NS)
        for number, trace in enumerate(traces)
        for event in trace.later(number * apart_ms, 100 * (number + 1)).events
    ]
    given = [
        (facts, [(stages.BY_NAME[e.stage].code, e.request, *e[5:], e.ref, e.t_ns) for e in events if e.process == one])
        for one, facts in FACTS.items()
    ]
    path = spool.with_name(f"{spool.name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(given))
    ago_ns = int((ago_ms + apart_ms * len(traces)) * 1e6)
    environment = {**os.environ, "KVTRACE_SPOOL": str(spool)}
    command = [sys.executable, "-c", EMIT, str(path), str(ago_ns)]
    subprocess.run(command, cwd=spooled.ROOT, env=environment, check=True, timeout=120)
