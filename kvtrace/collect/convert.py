"""Spool records to Arrow columns: no Python object per event, strings once per batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from kvtrace import stages, wire
from kvtrace.collect.amounts import are_possible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_STAGE_NAMES = pa.array([stage.name for stage in stages.STAGES])
_UNKNOWN = -1
_MOST = (1 << 63) - 1
_INDEX_OF_CODE = np.full(1 << 16, _UNKNOWN, np.int16)
for _index, _stage in enumerate(stages.STAGES):
    _INDEX_OF_CODE[_stage.code] = _index


# Where a process or its sender thread stands, whatever it worked on before.
_LASTING = np.array(
    [
        stage.where is stages.Where.PROCESS or stage in {stages.SENDER_WOKE, stages.SENDER_SLEPT}
        for stage in stages.STAGES
    ]
)


class Converted(NamedTuple):
    """Records as rows of table event, the first and the last time among them (unix ns, 0 without any).

    `unknown` were left out as of no known stage, `timeless` as of a time that no clock shows, `impossible` as of
    amounts that nothing has.
    """

    events: pa.Table
    oldest_ns: int
    newest_ns: int
    unknown: int
    timeless: int
    impossible: int


def to_events(
    records: NDArray[Any], strings: Mapping[int, str], process: int, offset_ns: int, from_monotonic_ns: int = 0
) -> Converted:
    """Return records of one segment, whose times become unix ns by adding `offset_ns`, as events.

    Of what happened before `from_monotonic_ns` only what lasts is returned: where processes and their threads stand.
    """
    index, times_ns = _INDEX_OF_CODE[records["code"]], records["t_ns"]
    is_known = index != _UNKNOWN
    # Compared without the offset: with it, a time that is none could come round to one that is.
    is_time = (times_ns >= -offset_ns) & (times_ns <= min(wire.LATEST_NS - offset_ns, _MOST))
    is_possible = are_possible(records)
    kept = is_known & is_time & is_possible
    if from_monotonic_ns:
        kept &= _LASTING[index] | (times_ns >= from_monotonic_ns)
    left_out = [len(index) - int(np.count_nonzero(one)) for one in (is_known, is_time, is_possible)]
    if not kept.all():
        records, index = records[kept], index[kept]
    events = _table(records, index, strings, process, offset_ns)
    if not len(records):
        return Converted(events, 0, 0, *left_out)
    oldest_ns, newest_ns = (int(edge) + offset_ns for edge in (records["t_ns"].min(), records["t_ns"].max()))
    return Converted(events, oldest_ns, newest_ns, *left_out)


def _table(
    records: NDArray[Any], index: NDArray[Any], strings: Mapping[int, str], process: int, offset_ns: int
) -> pa.Table:
    columns = {
        "process": pa.array(np.full(len(records), process, np.int32)),
        "stage": pa.DictionaryArray.from_arrays(pa.array(index), _STAGE_NAMES),
        "t_ns": pa.array(records["t_ns"] + np.int64(offset_ns)),
        "request": _texts(records["request"], strings),
        "ref": _texts(records["ref"], strings),
    }
    for slot in ("a", "b", "c", "d"):
        columns[slot] = pa.array(np.ascontiguousarray(records[slot]))
    return pa.table(columns)


def _texts(ids: NDArray[np.uint32], strings: Mapping[int, str]) -> pa.DictionaryArray:
    """Return string ids as a dictionary array: each string of the batch once, '' for an id that nobody knows."""
    present = np.zeros(int(ids.max(initial=0)) + 1, np.bool_)
    present[ids] = True
    used = np.flatnonzero(present)
    position = np.zeros(len(present), np.int32)
    position[used] = np.arange(len(used), dtype=np.int32)
    texts = [strings.get(key, "") for key in used.tolist()]
    return pa.DictionaryArray.from_arrays(pa.array(position[ids]), pa.array(texts, pa.string()))
