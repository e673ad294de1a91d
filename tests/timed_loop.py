"""How long one statement takes, timed in short loops."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 10  # calls unrolled into one turn of a timed loop


def loop_ns(statement: str, names: dict[str, Any], blocks: int = 400, turns: int = 20) -> float:
    """Return the ns of one statement: the lowest quarter of many short loops, since others use the machine too."""
    source = "def run(turns):\n for i in turns:\n" + f"  {statement}\n" * BLOCK
    scope = dict(names)
    exec(source, scope)  # noqa: S102 - the loop's own cost must not be a call
    run: Callable[[range], None] = scope["run"]
    took = []
    for _ in range(blocks):
        began = time.perf_counter_ns()
        run(range(turns))
        took.append((time.perf_counter_ns() - began) / turns / BLOCK)
    return float(np.percentile(took, 25))


def clock_ns() -> float:
    """Return the ns of one reading of the clock that every event has."""
    return loop_ns("now()", {"now": time.monotonic_ns})
