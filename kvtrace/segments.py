"""Spool files being read, also while they are written: whole records only, each exactly once, resumable.

A block is read twice: the first reading decides, by the commit words, which records are whole; the second takes them.
The other order tears, since a record's last word may be stored between the copying of its first and its last byte.
A slot that was taken and not filled (its thread was interrupted, or killed) is a hole: later records are returned, the
hole is looked at again until the file is left by its writer, then counted as lost.
"""

from __future__ import annotations

import os
import platform
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrace import clock, stages, wire
from kvtrace.errors import SpoolError
from kvtrace.strings import Strings
from kvtrace.wire import SegmentHeader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["RECORD", "Batch", "SegmentFile", "SegmentHeader"]

RECORD = np.dtype([
    ("t_ns", "<i8"), ("a", "<i8"), ("b", "<i8"), ("c", "<i8"), ("d", "<i8"),
    ("request", "<u4"), ("ref", "<u4"), ("code", "<u2"), ("unused", "V6"), ("commit", "<u8"),
])  # fmt: skip

BLOCK_RECORDS = 8192
GRACE_NS = 2_000_000_000  # a thread interrupted inside emit() has this long to fill its slot in a file that was left
SETTLE_S = 0.003  # between the two readings where the CPU may let another core see stores out of order
_STORES_IN_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386"}
_CAPACITY_MAX = 1 << 24  # a damaged header must not cost memory
_FIRST_SLOT = wire.HEADER_BYTES // wire.RECORD_BYTES

_VOCABULARY = wire.vocabulary_print()
_NO_RECORDS = np.empty(0, RECORD)
_KNOWN_CODES = np.zeros(1 << 16, np.bool_)
_KNOWN_CODES[[stage.code for stage in stages.STAGES]] = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole records not returned before, in slot order, and what the file says beside them.

    `records` has dtype RECORD; its string ids are keys of `strings`, 0 is "". Stages that only another vocabulary
    knows are among them and counted by code in `unknown`. `lost` counts records the process dropped since it began
    and slots of this file that were never filled; `damaged` those that no kvtrace can have written.
    """

    records: NDArray[Any]
    strings: dict[int, str]
    facts: dict[str, str]
    lost: int
    dropped: dict[int, int] = field(default_factory=dict)
    unknown: dict[int, int] = field(default_factory=dict)
    damaged: int = 0


def _columns(records: NDArray[Any]) -> NDArray[np.uint64]:
    """Return records as rows of eight words, which numpy copies many times faster than structures."""
    return records.view(np.uint64).reshape(-1, wire.RECORD_BYTES // 8)


def _rows(records: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
    rows: NDArray[Any] = _columns(records)[chosen].view(RECORD)[:, 0]
    return rows


class SegmentFile:
    """One spool file being read. `consumed` records and the `holes` among them (record numbers) resume it."""

    def __init__(self, path: Path, descriptor: int, header: SegmentHeader) -> None:
        self.path = path
        self.header = header
        self.consumed = 0
        self._descriptor = descriptor
        self._holes: list[int] = []
        self._strings = Strings()
        self._facts: dict[str, str] = {}
        self._unknown: dict[int, int] = {}
        self._unfinished = self._damaged = 0
        self._left_ns = 0
        self._sealed = False
        self._slots_max = min(header.capacity, _CAPACITY_MAX) + _FIRST_SLOT
        here = clock.boot_id() == header.boot_id and clock.pid_namespace() == str(header.pid_namespace)
        self._can_see_writer = here and header.start_ticks > 0

    @classmethod
    def open(cls, path: str | Path, consumed: int = 0, holes: Iterable[int] = ()) -> SegmentFile:
        """Return the file, to be read on after `consumed` records; SpoolError names a file that is not one."""
        path = Path(path)
        try:
            # Opening a pipe would wait for its writer, and with it whoever follows the folder.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SpoolError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SpoolError(f"{path}: is no regular file, as spool files are")
            file = cls(path, descriptor, wire.unpack_header(os.pread(descriptor, wire.HEADER_BYTES, 0), str(path)))
            file._replay(consumed, list(holes))
        except OSError as error:
            os.close(descriptor)
            raise SpoolError(f"{path}: cannot be read: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise
        return file

    @property
    def holes(self) -> tuple[int, ...]:
        """The records before `consumed` that are not whole yet."""
        return tuple(self._holes)

    @property
    def sealed(self) -> bool:
        """Whether nothing more can come: as of the start of the last poll, so an empty poll was the last."""
        return self._sealed

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def poll(self) -> Batch:
        """Return the whole records not yet returned."""
        was_left = self._sealed or self._look_at_writer()
        taken = self._reread_holes()
        while True:
            block, committed = self._read(self.consumed, BLOCK_RECORDS)
            if not len(block) or not (committed.any() or self._left_ns):
                break
            last = int(np.flatnonzero(committed)[-1]) + 1 if committed.any() else 0
            if last:
                taken.append(self._take(block[:last], committed[:last], self.consumed))
                self.consumed += last
            elif not self._skip_gap(len(block)):
                break
        if self._holes and any(map(len, taken)):
            taken += self._reread_holes()  # a string whose chunk became whole between two looks
        self._sealed = was_left and (not self._holes or time.monotonic_ns() - self._left_ns > GRACE_NS)
        if self._sealed:
            self._unfinished += len(self._holes)
            self._holes.clear()
        records = np.concatenate([_columns(part) for part in taken]).view(RECORD)[:, 0] if taken else _NO_RECORDS
        dropped = self._dropped()
        lost = sum(dropped.values()) + self._unfinished
        return Batch(records, self._strings.texts, dict(self._facts), lost, dropped, dict(self._unknown), self._damaged)

    # The writer --------------------------------------------------------------------------------------

    def _look_at_writer(self) -> bool:
        """Return whether the writer has left the file, and note since when that is known; a dead one fills no hole."""
        if self._can_see_writer and clock.process_start_ticks(self.header.pid) != self.header.start_ticks:
            self._left_ns = -GRACE_NS - 1
        elif not self._left_ns and self._was_left():
            self._left_ns = time.monotonic_ns()
        return self._left_ns != 0

    def _was_left(self) -> bool:
        mark = os.pread(self._descriptor, wire.COUNTER.size, wire.SEALED_OFFSET)
        if len(mark) == wire.COUNTER.size and wire.COUNTER.unpack(mark)[0]:
            return True
        if self._can_see_writer:
            return False
        # A writer out of sight keeps one file in reserve: the one after that exists only once this one is left.
        return (self.path.parent / wire.segment_name(self.header.series, self.header.number + 2)).exists()

    def _dropped(self) -> dict[int, int]:
        table = os.pread(self._descriptor, wire.HEADER_BYTES - wire.DROPS_OFFSET, wire.DROPS_OFFSET)
        counts = np.frombuffer(table[: len(table) // 8 * 8], "<u8")
        return {int(code): int(counts[code]) for code in np.flatnonzero(counts)}

    # Records -----------------------------------------------------------------------------------------

    def _read(self, start: int, count: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return up to `count` slots from record number `start` on, and which of them are whole.

        What lies beyond the records that a file may come to hold is none: a file of holes can be of any length.
        """
        count = max(0, min(count, self._slots_max - _FIRST_SLOT - start))
        offset = wire.HEADER_BYTES + start * wire.RECORD_BYTES
        first = os.pread(self._descriptor, count * wire.RECORD_BYTES, offset)
        whole = len(first) // wire.RECORD_BYTES
        expected = np.arange(offset, offset + whole * wire.RECORD_BYTES, wire.RECORD_BYTES, np.uint64)
        committed = np.frombuffer(first, RECORD, whole)["commit"] == expected
        if not committed.any():
            return np.empty(whole, RECORD), committed
        if not _STORES_IN_ORDER:
            time.sleep(SETTLE_S)
        second = os.pread(self._descriptor, whole * wire.RECORD_BYTES, offset)
        whole = len(second) // wire.RECORD_BYTES
        return np.frombuffer(second, RECORD, whole), committed[:whole]

    def _take(self, block: NDArray[Any], committed: NDArray[np.bool_], start: int) -> NDArray[Any]:
        """Return a block's events; note its strings, its facts and, as holes, what is not whole yet."""
        holes = start + np.flatnonzero(~committed)
        code = block["code"]
        if len(holes):
            code = np.where(committed, code, wire.VOID)
            self._holes += holes.tolist()
        is_chunk = (code == wire.STRING) & (block["request"] < self._slots_max)
        if is_chunk.any():
            self._strings.take(_rows(block, is_chunk))
        rest = ~((code == wire.STRING) | (code == wire.VOID))
        resolved = rest & self._strings.known(block["request"]) & self._strings.known(block["ref"])
        if np.count_nonzero(resolved) < np.count_nonzero(rest):
            self._holes += (start + np.flatnonzero(rest & ~resolved)).tolist()
        texts = self._strings.texts
        for fact in _rows(block, resolved & (code == wire.FACT)):
            self._facts[texts[int(fact["request"])]] = texts[int(fact["ref"])]
        known = _KNOWN_CODES[code]
        events = resolved & (block["t_ns"] > 0) & (code < wire.VOID)
        if self.header.vocabulary == _VOCABULARY:
            events &= known
        self._damaged += int(np.count_nonzero(resolved & ~events & (code != wire.FACT)))
        for value in code[events & ~known].tolist():
            self._unknown[value] = self._unknown.get(value, 0) + 1
        return _rows(block, events)

    def _reread_holes(self) -> list[NDArray[Any]]:
        """Look at the holes again and return what has become whole."""
        holes, self._holes = self._holes, []
        found = []
        for number in holes:
            block, committed = self._read(number, 1)
            if len(block):
                found.append(self._take(block, committed, number))
            else:
                self._holes.append(number)
        return [records for records in found if len(records)]

    def _skip_gap(self, count: int) -> bool:
        """In a file that was left, pass over a block without records if any follow it; return whether some do."""
        start = self.consumed + count
        while True:
            block, committed = self._read(start, BLOCK_RECORDS)
            if committed.any():
                self._holes += range(self.consumed, start)
                self.consumed = start
                return True
            if len(block) < BLOCK_RECORDS:
                return False
            start += len(block)

    def _replay(self, consumed: int, holes: list[int]) -> None:
        """Take in the strings and facts before `consumed` again; their events were returned before."""
        self._damaged = 0
        while self.consumed < consumed:
            block, committed = self._read(self.consumed, min(BLOCK_RECORDS, consumed - self.consumed))
            if not len(block):
                break
            self._take(block, committed, self.consumed)
            self.consumed += len(block)
        self.consumed = consumed
        self._holes = holes
        self._damaged = 0
        self._unknown.clear()
