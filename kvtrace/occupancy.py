"""Who holds an engine's KV blocks: requests that compute, or requests that wait for KV and blocks kept for others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from kvtrace import stages
from kvtrace.model import NEVER_NS, Event

_PREFILL_ENDS = frozenset((stages.PREFILL_ABORTED.name, stages.PREFILL_PREEMPTED.name))
_DECODE_ENDS = frozenset((stages.DECODE_FINISHED.name, stages.DECODE_ABORTED.name, stages.DECODE_PREEMPTED.name))
_LETS_GO = frozenset((stages.PREFILL_RELEASED.name, stages.LEASE_EXPIRED.name))
STAGES = frozenset(
    (
        stages.PREFILL_ALLOCATED.name, stages.PREFILL_FINISHED.name, stages.DECODE_ALLOCATED.name, stages.READY.name,
        *_PREFILL_ENDS, *_DECODE_ENDS, *_LETS_GO,
    )
)  # fmt: skip
"""The stages that say who holds blocks."""


class Span(NamedTuple):
    """Blocks in one hand: from, until (unix ns), how many, and whether their holder computes."""

    start_ns: int
    end_ns: int
    blocks: int
    computes: bool


class Held(NamedTuple):
    """Blocks at one moment: of requests that compute, and of those that wait for KV or are kept for a hand-off."""

    computing: int = 0
    waiting: int = 0


class Occupancy:
    """The blocks of one engine over time."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        changes = []
        for span in spans:
            signed = (span.blocks, 0) if span.computes else (0, span.blocks)
            changes += [(span.start_ns, *signed), (span.end_ns, -signed[0], -signed[1])]
        changes.sort()
        self._times = [change[0] for change in changes]
        self._computing = list(accumulate(change[1] for change in changes))
        self._waiting = list(accumulate(change[2] for change in changes))

    def at(self, t_ns: int) -> Held:
        """Return who holds how many blocks at that time."""
        position = bisect_right(self._times, t_ns) - 1
        return Held(self._computing[position], self._waiting[position]) if position >= 0 else Held()


def spans(seen: Iterable[Event]) -> list[Span]:
    """Return the holdings of one request on one engine, from its events of `STAGES` in time order."""
    found: list[Span] = []
    held: tuple[int, int, bool] | None = None
    for event in seen:
        if held is not None:
            found.append(Span(held[0], event.t_ns, held[1], held[2]))
        blocks = held[1] if held is not None else 0
        if event.stage == stages.DECODE_ALLOCATED.name:
            held = (event.t_ns, max(event.a, blocks), not event.b)
        elif event.stage == stages.PREFILL_ALLOCATED.name:
            held = (event.t_ns, max(event.a, blocks), True)
        elif event.stage == stages.READY.name:
            held = (event.t_ns, blocks, True)
        elif event.stage == stages.PREFILL_FINISHED.name:
            held = (event.t_ns, event.a, False) if event.b else None
        elif event.stage in _PREFILL_ENDS or event.stage in _DECODE_ENDS or event.stage in _LETS_GO:
            held = None
    if held is not None:
        found.append(Span(held[0], NEVER_NS, held[1], held[2]))
    return [span for span in found if span.blocks and span.end_ns > span.start_ns]
