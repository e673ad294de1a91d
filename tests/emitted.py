"""Traces as running processes emit them: into spool files, each process with its facts and on the clock of now."""

from __future__ import annotations

import json
import time
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


def emit(spool: Path, *traces: Trace, apart_ms: float = 0.0, ago_ms: float = 150.0) -> None:
    """Emit traces from a process each for the router, P, D and their servers; the first began `ago_ms` before."""
    begin_ns = time.monotonic_ns() - int((ago_ms + apart_ms * len(traces)) * 1e6)
    events = [
        event._replace(t_ns=event.t_ns - START_NS + begin_ns)
        for number, trace in enumerate(traces)
        for event in trace.later(number * apart_ms, 100 * (number + 1)).events
    ]
    for process, facts in FACTS.items():
        own = [
            (stages.BY_NAME[event.stage].code, event.request, *event[5:], event.ref, event.t_ns)
            for event in events
            if event.process == process
        ]
        given = spool.with_name(f"{spool.name}-{process}.json")
        given.parent.mkdir(parents=True, exist_ok=True)
        given.write_text(json.dumps(own))
        script = f"""
import json
for name, value in {facts!r}.items():
    tracer.fact(name, value)
for event in json.load(open({str(given)!r})):
    tracer.emit(*event)
"""
        spooled.run(script, spool)
