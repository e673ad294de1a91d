"""Whether the blocks that D has are those that P computed, from the checksums that both sides took.

A block counts only where both sides have one checksum of it, over as many bytes; every other one that was handed over
is unchecked, with the reason. Nothing is said of requests that were not chosen for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvtrace import stages
from kvtrace.model import Event, Integrity, Process, Request
from kvtrace.modes import PUSH
from kvtrace.wording import plural

STAGES = frozenset((stages.PREFILL_CHECKED.name, stages.DECODE_CHECKED.name, stages.UNCHECKED.name))
"""The stages of checking, which come at any time and are no steps of the hand-off."""

_Block = tuple[int, int]
_Sums = dict[_Block, set[tuple[int, int]]]


def integrity(request: Request, processes: Mapping[int, Process]) -> Integrity | None:
    """Return what the checksums say of the request's blocks, None where nobody was to take any."""
    seen = request.events
    if not STAGES.intersection(seen):
        return None
    names = {event.request for event in seen.get(stages.DECODE_ENQUEUED.name, ())}
    computed = _sums(
        event for event in seen.get(stages.PREFILL_CHECKED.name, ()) if not event.ref or not names or event.ref in names
    )
    arrived = _sums(seen.get(stages.DECODE_CHECKED.name, ()))
    missed = seen.get(stages.UNCHECKED.name, ())
    handed_over = len(arrived) + _count(missed, processes, request.decode_engine)
    if request.mode == PUSH:
        handed_over = max(handed_over, len(computed) + _count(missed, processes, request.prefill_engine))
    why = [event.ref for event in missed if event.ref]
    widths = [_width(processes, engine) for engine in (request.prefill_engine, request.decode_engine)]
    if widths[0] != widths[1]:
        apart = f"P has {widths[0]} and D {widths[1]} tensor-parallel ranks, which cut blocks differently"
        return Integrity(unchecked=handed_over, why=(apart,))
    both = [block for block in arrived if block in computed and _is_comparable(computed[block], arrived[block])]
    corrupt = tuple(sorted(block for block in both if computed[block] != arrived[block]))
    unchecked = handed_over - len(both)
    if unchecked and not why:
        why = [_lacking(computed, arrived)]
    return Integrity(len(both), corrupt, max(0, unchecked), tuple(sorted(set(why))) if unchecked > 0 else ())


def told(found: Integrity, mode: str) -> str:
    """Return the clause that names the blocks that differ."""
    side = "D" if mode == PUSH else "P"
    by_rank: dict[int, list[str]] = defaultdict(list)
    for rank, block in found.corrupt:
        by_rank[rank].append(str(block))
    blocks = "; ".join(f"rank {rank}, by their numbers on {side}: {', '.join(of)}" for rank, of in by_rank.items())
    return f"{len(found.corrupt)} of {plural(found.checked, 'block')} on D differ from what P computed ({blocks})"


def _sums(events: Iterable[Event]) -> _Sums:
    found: _Sums = defaultdict(set)
    for event in events:
        found[event.a, event.b].add((event.c, event.d))
    return found


def _is_comparable(one: set[tuple[int, int]], other: set[tuple[int, int]]) -> bool:
    """Return whether each side knows one checksum, and both cover as many bytes."""
    return len(one) == len(other) == 1 and next(iter(one))[1] == next(iter(other))[1]


def _count(missed: Iterable[Event], processes: Mapping[int, Process], engine: str) -> int:
    return sum(event.b for event in missed if event.process in processes and processes[event.process].engine == engine)


def _width(processes: Mapping[int, Process], engine: str) -> int:
    return max((process.tp_size for process in processes.values() if process.engine == engine), default=1)


def _lacking(computed: _Sums, arrived: _Sums) -> str:
    if not computed:
        return "there is no checksum of P's"
    if not arrived:
        return "there is no checksum of D's"
    return "P and D have no checksum of the same bytes"
