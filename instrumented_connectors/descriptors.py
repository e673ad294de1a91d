"""How many bytes a selection of NIXL descriptors covers, whatever NIXL's telemetry says."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from operator import mul
from typing import Any


class Lengths:
    """The lengths of a list of descriptors, kept as runs of equal ones: a few numbers for millions."""

    __slots__ = ("_ends", "_lengths")

    def __init__(self, ends: list[int], lengths: list[int]) -> None:
        self._ends = ends
        self._lengths = lengths

    @classmethod
    def of(cls, descs: Any) -> Lengths | None:
        """Return the lengths of descriptors as NIXL takes them, None for a form that tells none.

        Rows are (address, length, device) or, strided, (address, length, device, stride, count).
        """
        if getattr(descs, "ndim", 0) == 2 and len(descs):
            if descs.shape[1] == 5:
                return cls._runs(descs[:, 1].tolist(), descs[:, 4].tolist())
            column = descs[:, 1]
            starts = [0, *((column[1:] != column[:-1]).nonzero()[0] + 1).tolist()]
            ends = [*starts[1:], len(column)]
            return cls(ends, column[starts].tolist())
        if isinstance(descs, list) and descs and isinstance(descs[0], tuple) and len(descs[0]) == 3:
            return cls._runs([row[1] for row in descs], [1] * len(descs))
        return None

    @classmethod
    def _runs(cls, lengths: list[int], counts: list[int]) -> Lengths:
        ends: list[int] = []
        merged: list[int] = []
        position = 0
        for length, count in zip(lengths, counts, strict=True):
            position += int(count)
            if merged and merged[-1] == length:
                ends[-1] = position
            else:
                ends.append(position)
                merged.append(int(length))
        return cls(ends, merged)

    def total(self, indices: Any) -> int:
        """Return the bytes of the descriptors with these indices (a list or an array)."""
        if len(self._lengths) == 1:
            return int(len(indices) * self._lengths[0])
        if not hasattr(indices, "searchsorted"):
            return sum(self._lengths[bisect_right(self._ends, index)] for index in indices)
        ordered = indices.copy()
        ordered.sort()
        edges = [0, *ordered.searchsorted(self._ends).tolist()]
        counts = [end - begin for begin, end in pairwise(edges)]
        return int(sum(map(mul, counts, self._lengths)))


def handle_key(handle: Any) -> int:
    """Return what tells a live handle of NIXL's from others, without keeping it alive."""
    return handle if isinstance(handle, int) else id(handle)
