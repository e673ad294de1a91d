"""What the scheduler's side tells each worker's side about a step, and when the worker took the step up."""

from __future__ import annotations

from typing import Any

from instrumented_connectors.watch import now_ns


class StepMark(tuple[int, int, bool]):
    """(step, tokens, loads come late), carried by the connector's metadata.

    A worker makes its copy by unpickling it, which it does when it takes the step from its queue: no connector hook
    runs as early, and what the worker prepares before the first one belongs to the step. `taken_ns` is that moment
    (CLOCK_MONOTONIC), 0 where scheduler and worker share a process and nothing is pickled.
    """

    taken_ns = 0

    @property
    def tokens(self) -> int:
        """Return how many tokens the step computes."""
        return self[1]

    @property
    def loads_late(self) -> bool:
        """Return whether the step's loads come behind its forward."""
        return self[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, tuple(self)


def _taken(step: int, tokens: int, loads_late: bool) -> StepMark:
    mark = StepMark((step, tokens, loads_late))
    mark.taken_ns = now_ns()
    return mark
