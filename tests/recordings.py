"""Spool folders that are written and recorded in tests, and what became of their events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvtrace import stages
from kvtrace.analyze import Writing
from kvtrace.collect import Recorder
from kvtrace.store import Store
from tests import spooled

ROOT = Path(__file__).parent.parent


STEP = stages.STEP_STARTED.code


def record_once(output: Path, *spools: Path, **options: Any) -> Recorder:
    """Record what is there; without an analysis, which takes half of the time, unless one is among the options."""
    recorder = Recorder(output, list(spools), {"command": "test"}, **{"analysis": None, **options})
    recorder.run_once()
    return recorder


def at_once(analysis: Callable[[Store, int | None], int]) -> Callable[..., Writing]:
    """Return an analysis for a recorder that does all its work where it writes."""
    return lambda store, since_ns, _meanwhile: partial(analysis, store, since_ns)


def numbers(output: Path, stage: str = "step.started") -> list[int]:
    """Return what payload a of that stage holds, in order: the tests count with it."""
    with Store.open(output) as store:
        return [row["a"] for row in store.rows("SELECT a FROM event WHERE stage = $s ORDER BY a", {"s": stage})]


def write(spool: Path, first: int, count: int, request: str = "r{}", **facts: str) -> None:
    """Emit `count` numbered events from a process of its own, which ends."""
    script = f"""
for name, value in {facts!r}.items():
    tracer.fact(name, value)
for i in range({first}, {first + count}):
    tracer.emit({STEP}, {request!r}.format(i // 25), i)
"""
    spooled.run(script, spool)
