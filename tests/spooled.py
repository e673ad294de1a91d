"""Spool folders in tests: read everything that a folder holds, or run a writer in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.segments import SegmentFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrace.segments import Batch

ROOT = Path(__file__).parent.parent


@dataclass
class Event:
    """One event with its strings looked up."""

    code: int
    request: str
    numbers: tuple[int, ...]
    ref: str
    t_ns: int


@dataclass
class Spooled:
    """What a folder held: events in file and slot order, facts, losses."""

    events: list[Event] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    unfinished: int = 0
    series: list[str] = field(default_factory=list)

    def of(self, code: int) -> list[Event]:
        """Return the events of one stage."""
        return [event for event in self.events if event.code == code]


def read(paths: Iterable[Path] | Path) -> Spooled:
    """Return all that is in these files, or in a folder's."""
    found = Spooled()
    for path in sorted(paths.glob("*.kvt")) if isinstance(paths, Path) else paths:
        file = SegmentFile.open(path)
        batch = file.poll()
        found.events += events_of(batch)
        found.facts |= batch.facts
        for code, count in batch.dropped.items():
            found.dropped[code] = max(count, found.dropped.get(code, 0))
        found.unfinished += batch.lost - sum(batch.dropped.values()) + len(file.holes)
        assert batch.damaged == 0
        if file.header.series not in found.series:
            found.series.append(file.header.series)
        file.close()
    return found


def events_of(batch: Batch) -> list[Event]:
    """Return a batch's records with their strings."""
    fields = [batch.records[name].tolist() for name in ("code", "request", "a", "b", "c", "d", "ref", "t_ns")]
    return [
        Event(code, batch.strings[request], (a, b, c, d), batch.strings[ref], t_ns)
        for code, request, a, b, c, d, ref, t_ns in zip(*fields, strict=True)
    ]


def start(script: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a Python process that finds `tracer` made and KVTRACE_SPOOL set to the folder."""
    code = "from kvtrace import emit\ntracer = emit.tracer()\n" + script
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "KVTRACE_SPOOL": str(folder), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(script: str, folder: Path, **environment: str) -> str:
    """Run such a process to its end; return what it printed."""
    process = start(script, folder, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
