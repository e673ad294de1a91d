"""Spool records to Arrow columns: no Python object per event, strings once per batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_STAGE_NAMES = pa.array([stage.name for stage in stages.STAGES])
_UNKNOWN = -1
_INDEX_OF_CODE = np.full(1 << 16, _UNKNOWN, np.int16)
for _index, _stage in enumerate(stages.STAGES):
    _INDEX_OF_CODE[_stage.code] = _index


def to_events(records: NDArray[Any], strings: Mapping[int, str], process: int, offset_ns: int) -> tuple[pa.Table, int]:
    """Return records of one segment as rows of table event, and how many were left out as of no known stage."""
    index = _INDEX_OF_CODE[records["code"]]
    unknown = int(np.count_nonzero(index == _UNKNOWN))
    if unknown:
        kept = index != _UNKNOWN
        records, index = records[kept], index[kept]
    columns = {
        "process": pa.array(np.full(len(records), process, np.int32)),
        "stage": pa.DictionaryArray.from_arrays(pa.array(index), _STAGE_NAMES),
        "t_ns": pa.array(records["t_ns"] + np.int64(offset_ns)),
        "request": _texts(records["request"], strings),
        "ref": _texts(records["ref"], strings),
    }
    for slot in ("a", "b", "c", "d"):
        columns[slot] = pa.array(np.ascontiguousarray(records[slot]))
    return pa.table(columns), unknown


def _texts(ids: NDArray[np.uint32], strings: Mapping[int, str]) -> pa.DictionaryArray:
    """Return string ids as a dictionary array: each string of the batch once, '' for an id that nobody knows."""
    present = np.zeros(int(ids.max(initial=0)) + 1, np.bool_)
    present[ids] = True
    used = np.flatnonzero(present)
    position = np.zeros(len(present), np.int32)
    position[used] = np.arange(len(used), dtype=np.int32)
    texts = [strings.get(key, "") for key in used.tolist()]
    return pa.DictionaryArray.from_arrays(pa.array(position[ids]), pa.array(texts, pa.string()))
