"""When a scheduler looked at a waiting request, and whether it gave it blocks in that turn."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from kvtrace import stages
from kvtrace.model import Event, Look

_ENQUEUED = frozenset((stages.PREFILL_ENQUEUED.name, stages.DECODE_ENQUEUED.name))
_CONSIDERED = frozenset((stages.PREFILL_CONSIDERED.name, stages.DECODE_CONSIDERED.name))
STAGES = _ENQUEUED | _CONSIDERED | {stages.PREFILL_ALLOCATED.name, stages.DECODE_ALLOCATED.name}
"""The stages that say whom a scheduler looked at, and whether it gave blocks."""
AT_ONCE_NS = 1_000_000
"""A look and the blocks that it leads to are parts of one call of the scheduler, in ns."""


def vain(queued: Iterable[list[Event]], stamps: Iterable[Event]) -> Iterator[Look]:
    """Yield the looks of one engine's scheduler after which a request got no blocks.

    `queued` are the events of `STAGES` by request, `stamps` those of the engine's steps.
    """
    made_ns = sorted(event.t_ns for event in stamps if event.stage == stages.STEP_SCHEDULED.name)
    for seen in queued:
        yield from _vain(sorted(seen), made_ns)


def _vain(seen: list[Event], made_ns: list[int]) -> Iterator[Look]:
    enqueued_ns: int | None = None
    for position, event in enumerate(seen):
        if event.stage in _ENQUEUED:
            enqueued_ns = event.t_ns
        elif event.stage in _CONSIDERED and enqueued_ns is not None:
            after = seen[position + 1] if position + 1 < len(seen) else None
            if after is None or after.stage in _CONSIDERED or not is_one_turn(event.t_ns, after.t_ns, made_ns):
                yield Look(event.t_ns, enqueued_ns)


def is_one_turn(look_ns: int, given_ns: int, made_ns: list[int]) -> bool:
    """Return whether the scheduler gave blocks in the turn in which it looked; `made_ns` is when it made steps up."""
    return given_ns - look_ns <= AT_ONCE_NS or bisect_left(made_ns, given_ns) == bisect_right(made_ns, look_ns)
