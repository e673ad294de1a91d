"""Which payloads an emitter can have written: larger amounts come of damage or of malice, and overflow what adds them.

One of them would keep the answers about all other requests from being given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrace import stages, wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST = {"ns": 1 << 56, "bytes": 1 << 48, "tokens": 1 << 40, "blocks": 1 << 40, "": 1 << 53}
"""By unit, either way: two years, 256 TiB, and numbers of which a thousand can be added."""
_MOST_BY_NAME = {
    "wall_ns": wire.LATEST_NS, "arrival_wall_ns": wire.LATEST_NS, "last_pending_ns": 1 << 60,
    "attempt": (1 << 31) - 1, "rank": (1 << 31) - 1,
}  # fmt: skip
"""Readings of clocks, and what the store keeps in 32 bits."""
_BITS = frozenset((stages.ROUTER_TRACED,))
"""Stages whose numbers are no amounts."""
_LEAST_MOST = min(*_MOST.values(), *_MOST_BY_NAME.values())

_MOST_OF_CODE = {slot: np.full(1 << 16, np.iinfo(np.int64).max) for slot in ("a", "b", "c", "d")}
for _stage in stages.STAGES:
    for _field in _stage.fields if _stage not in _BITS else ():
        if _field.slot in _MOST_OF_CODE:
            _MOST_OF_CODE[_field.slot][_stage.code] = _MOST_BY_NAME.get(_field.name, _MOST[_field.unit])


def are_possible(records: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which of these records say only what an emitter can have written; slots without a meaning may hold all."""
    possible = np.ones(len(records), np.bool_)
    for slot, most_of_code in _MOST_OF_CODE.items():
        values = records[slot]
        large = np.flatnonzero((values > _LEAST_MOST) | (values < -_LEAST_MOST))
        if len(large):  # hardly any is: their codes are looked up one by one
            most = most_of_code[records["code"][large]]
            possible[large] &= (values[large] <= most) & (values[large] >= ~most)
    return possible
