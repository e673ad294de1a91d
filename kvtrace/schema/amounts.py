"""Which payloads an emitter can have written: larger amounts come of damage or of malice, and overflow what adds them.

One of them would keep the answers about all other requests from being given.
"""

from __future__ import annotations

from kvtrace import stages, wire
from kvtrace.schema.walk.aggregates import among

SLOTS = ("a", "b", "c", "d")
_MOST = {"ns": 1 << 56, "bytes": 1 << 48, "tokens": 1 << 40, "blocks": 1 << 40, "": 1 << 53}
"""By unit, either way: two years, 256 TiB, and numbers of which a thousand can be added."""
_MOST_BY_NAME = {
    "wall_ns": wire.LATEST_NS, "arrival_wall_ns": wire.LATEST_NS, "last_pending_ns": 1 << 60,
    "attempt": (1 << 31) - 1, "rank": (1 << 31) - 1,
}  # fmt: skip
"""Readings of clocks, and what the store keeps in 32 bits."""
_BITS = frozenset((stages.ROUTER_TRACED,))
"""Stages whose numbers are no amounts."""
LEAST_MOST = min(*_MOST.values(), *_MOST_BY_NAME.values())
"""What lies within this, either way, is possible in every slot."""


def most() -> dict[str, dict[stages.Stage, int]]:
    """Return by slot the largest amount of each stage, either way; slots without a meaning may hold all."""
    return {
        slot: {
            stage: _MOST_BY_NAME.get(field.name, _MOST[field.unit])
            for stage in stages.STAGES
            for field in stage.fields
            if field.slot == slot and stage not in _BITS
        }
        for slot in SLOTS
    }


def impossible() -> str:
    """Return the condition, in SQL, that a row of table event holds an amount that nothing has."""
    is_large = " OR ".join(f"{slot} NOT BETWEEN {~LEAST_MOST} AND {LEAST_MOST}" for slot in SLOTS)
    too_large = []
    for slot, most_of in most().items():
        for limit in sorted(set(most_of.values())):
            of = among(*(stage for stage, its in most_of.items() if its == limit))
            too_large.append(f"{slot} NOT BETWEEN {~limit} AND {limit} AND {of}")
    return f"(({is_large}) AND ({' OR '.join(too_large)}))"
