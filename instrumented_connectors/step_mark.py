"""What the scheduler's side tells each worker's side about a step, when the worker took it up, how it was starved."""

from __future__ import annotations

import threading
from typing import Any

from instrumented_connectors.starvation import WORTH_NS, starved_ns
from instrumented_connectors.watch import now_ns


class StepMark(tuple[int, int, bool, bool]):
    """(step, tokens, loads come late, works on a prompt), carried by the connector's metadata.

    A worker makes its copy by unpickling it, which it does when it takes the step from its queue: no connector hook
    runs as early, and what the worker prepares before the first one belongs to the step. `taken_ns` is that moment
    (CLOCK_MONOTONIC), 0 where scheduler and worker share a process and nothing is pickled, and `taken_starved_ns` what
    the kernel counted for the thread until then, asked only where a first token depends on the step.
    """

    taken_ns = 0
    taken_starved_ns = 0
    rank = 0
    _thread = 0
    _connected_ns = 0
    _connected_starved_ns = 0

    @property
    def tokens(self) -> int:
        """Return how many tokens the step computes."""
        return self[1]

    @property
    def loads_late(self) -> bool:
        """Return whether the step's loads come behind its forward."""
        return self[2]

    @property
    def is_prompt(self) -> bool:
        """Return whether the step works on a prompt, so that a first token depends on it."""
        return self[3]

    def connected(self, rank: int, now: int, count_ns: int) -> None:
        """Note that this thread is through with the connector's work, and what the kernel has counted for it (ns)."""
        self.rank = rank
        self._thread, self._connected_ns, self._connected_starved_ns = threading.get_ident(), now, count_ns

    def starved_since_ns(self, now: int, count_ns: int | None = None) -> int:
        """Return for how long, ns, this thread had no processor since it was through with the connector's work.

        `count_ns` is what the kernel has counted until now; without it the kernel is asked, if it is worth it.
        0 where that was another thread: the scheduler of a worker in another process sees none of this.
        """
        if self._thread != threading.get_ident() or now - self._connected_ns < WORTH_NS:
            return 0
        count_ns = starved_ns() if count_ns is None else count_ns
        return min(max(0, count_ns - self._connected_starved_ns), now - self._connected_ns)

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, tuple(self)


def _taken(step: int, tokens: int, loads_late: bool, is_prompt: bool) -> StepMark:
    mark = StepMark((step, tokens, loads_late, is_prompt))
    mark.taken_ns = now_ns()
    if is_prompt:
        mark.taken_starved_ns = starved_ns()
    return mark
