"""Records whose payloads no emitter can have written, told from the others before they get into a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrace.schema.amounts import LEAST_MOST, SLOTS, most

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_OF_CODE = {slot: np.full(1 << 16, np.iinfo(np.int64).max) for slot in SLOTS}
for _slot, _most_of in most().items():
    for _stage, _limit in _most_of.items():
        _MOST_OF_CODE[_slot][_stage.code] = _limit


def are_possible(records: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which of these records say only what an emitter can have written; slots without a meaning may hold all."""
    possible = np.ones(len(records), np.bool_)
    for slot, most_of_code in _MOST_OF_CODE.items():
        values = records[slot]
        large = np.flatnonzero((values > LEAST_MOST) | (values < -LEAST_MOST))
        if len(large):  # hardly any is: their codes are looked up one by one
            limit = most_of_code[records["code"][large]]
            possible[large] &= (values[large] <= limit) & (values[large] >= ~limit)
    return possible
