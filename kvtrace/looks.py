"""When a scheduler looked at a waiting request, and whether it gave it blocks in that turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvtrace import stages
from kvtrace.model import Event, Look

_ENQUEUED = frozenset((stages.PREFILL_ENQUEUED.name, stages.DECODE_ENQUEUED.name))
_CONSIDERED = frozenset((stages.PREFILL_CONSIDERED.name, stages.DECODE_CONSIDERED.name))
_ALLOCATED = frozenset((stages.PREFILL_ALLOCATED.name, stages.DECODE_ALLOCATED.name))
STAGES = _ENQUEUED | _CONSIDERED | _ALLOCATED
"""The stages that say whom a scheduler looked at, and whether it gave blocks."""
AT_ONCE_NS = 1_000_000
"""A look and the blocks that it leads to are parts of one call of the scheduler, in ns."""


def vain(queued: Iterable[list[Event]]) -> Iterator[Look]:
    """Yield the looks of one engine's scheduler after which a request got no blocks.

    `queued` are the events of `STAGES` by request.
    """
    for seen in queued:
        yield from _vain(sorted(seen))


def _vain(seen: list[Event]) -> Iterator[Look]:
    enqueued_ns: int | None = None
    for position, event in enumerate(seen):
        if event.stage in _ENQUEUED:
            enqueued_ns = event.t_ns
        elif event.stage in _CONSIDERED and enqueued_ns is not None:
            after = seen[position + 1] if position + 1 < len(seen) else None
            if after is None or after.stage in _CONSIDERED or after.t_ns - event.t_ns > turn_ns(after):
                yield Look(event.t_ns, enqueued_ns)


def turn_ns(given: Event) -> int:
    """Return for how long at most the scheduler may have worked on a request until it gave it these blocks, ns."""
    return max(AT_ONCE_NS, given.c) if given.stage in _ALLOCATED else AT_ONCE_NS
