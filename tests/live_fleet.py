"""A small fleet whose processes emit its events when they are due, each into a spool: load without engines."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtrace import stages
from kvtrace.testing import Fleet, batches
from tests import spooled

_START_S = 1.5
"""So long after they are started all processes begin together."""
_AFTER_S = 0.5
"""How much longer than the last request the engines' steps go on."""
_ID = re.compile("kvt-[0-9a-f]{32}")

_EMIT = """
import json, time
begin_ns = {begin_ns}
for name, value in {facts!r}.items():
    tracer.fact(name, value)
for at_ns, code, request, a, b, c, d, ref in json.load(open({path!r})):
    due_ns = begin_ns + at_ns
    if (left_ns := due_ns - time.monotonic_ns()) > 1_000_000:
        time.sleep(left_ns / 1e9)
    tracer.emit(code, request, a, begin_ns + b if code == {done} and b else b, c, d, ref, due_ns)
"""


@dataclass(frozen=True)
class Emitting:
    """What is being emitted: the requests' ids as their router minted them, events, when it is over, by whom."""

    request_ids: frozenset[str]
    events: int
    end_s: float
    processes: tuple[subprocess.Popen[str], ...]

    def wait(self, timeout_s: float) -> None:
        """Return once everything has been emitted; raise AssertionError if a process failed."""
        for process in self.processes:
            _, errors = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, errors


@contextmanager
def emitting(fleet: Fleet, folder: Path, spool: Path) -> Iterator[Emitting]:
    """Start the processes of a fleet of one pair, each with its own events; they are ended with the block.

    Its engines are called `live-p` and `live-d`. Events bear the times at which they were due, so that a busy machine
    changes nothing about the requests; they reach the spool a little later.
    """
    assert fleet.pairs == 1
    facts = {1: {"kind": "router"}}
    for side, number in (("p", fleet.prefill(0)), ("d", fleet.decode(0))):
        facts[number] = {"kind": "core", "engine_id": f"live-{side}", "tp_size": "1"}
        facts[number + 1] = {"kind": "api", "engine_id": f"live-{side}"}
    mine, ids, seconds = events_of(fleet)
    began_s, started = time.monotonic() + _START_S, []
    try:
        for process, events in mine.items():
            path = folder / f"events{process}.json"
            path.write_text(json.dumps(events))
            script = _EMIT.format(
                facts=facts[process], path=str(path), begin_ns=int(began_s * 1e9), done=stages.TRANSFER_DONE.code
            )
            started.append(spooled.start(script, spool))
        yield Emitting(ids, sum(map(len, mine.values())), began_s + seconds, tuple(started))
    finally:
        for process in started:
            process.kill()
            process.communicate()


def events_of(fleet: Fleet) -> tuple[dict[int, list[tuple[Any, ...]]], frozenset[str], float]:
    """Return each process's events (ns from the beginning, then what `emit` takes), the ids, how long it takes, s.

    All events of all requests, and steps of the engines until a little after.
    """
    rows = [row for batch in batches(fleet) for row in batch.to_pylist()]
    end_ns = max(row["t_ns"] for row in rows if row["request"]) + int(_AFTER_S * 1e9)
    mine: dict[int, list[tuple[Any, ...]]] = {}
    ids: set[str] = set()
    for row in rows:
        ids.update(_ID.findall(row["request"]))
        if not fleet.start_ns <= row["t_ns"] <= end_ns:
            continue
        stage = stages.BY_NAME[row["stage"]]
        if stage is stages.TRANSFER_DONE and row["b"]:
            row["b"] -= fleet.start_ns  # a time, as the event's own is
        event = (row["t_ns"] - fleet.start_ns, stage.code, row["request"], *(row[slot] for slot in "abcd"), row["ref"])
        mine.setdefault(row["process"], []).append(event)
    for events in mine.values():
        events.sort()
    return mine, frozenset(ids), (end_ns - fleet.start_ns) / 1e9
