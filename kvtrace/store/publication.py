"""Putting a snapshot of a store in place at the cost of what has changed in it, however large it is.

The snapshot before the last one is kept under a name of its own, brought up to date block by block, and put in place
by a rename. That is done only under a lease, which the kernel grants while nobody has it open: whoever opened a
snapshot keeps it as it was, and whoever is just opening it (by the name that it had) waits until it is whole again.
Otherwise the store is copied whole. What a killed process left is compared byte by byte, since it may be torn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtrace.errors import StoreError
from kvtrace.store.files import PUBLISHING_SUFFIX, SPARE_SUFFIX, beside, copy_through, put_in_place

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

Extent = Literal["whole", "changed"]
"""What was gone through: every byte of the store, or what differs from a snapshot that was known of before."""

_HEADERS_BYTES = 3 * 4096  # DuckDB's own: one of the file, two of which the newer counts
_BLOCK_BYTES = 262_144
_CHECKSUM_BYTES = 8  # with which every block begins; DuckDB writes whole blocks only
# DuckDB's checksum does not tell the order of a block's words, so that two that change places leave it as it was. Where
# that may happen, blocks are compared byte by byte: those that have changed lately, which are written over and over
# again, and of the others so many at a time.
_LATELY = 256
_IN_TURN = 128


class Publication:
    """Where one snapshot after the other is put. Only one process may do so for one target at a time."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._spare = beside(target, SPARE_SUFFIX)
        self._own = _inode(target)  # what was put in place last, by whomever
        self._known: dict[int, _Known] = {}  # by inode, of the last two snapshots
        self._number = 0
        self._changed: dict[int, int] = {}  # by block, in which of the last publications it was found to have changed
        self._take_over()

    def _take_over(self) -> None:
        """Have what a process that was killed left be the next snapshot's ground: perhaps torn, and known as nobody's.

        It was killed before the spare had this name again, or behind.
        """
        arriving = beside(self.target, PUBLISHING_SUFFIX)
        with contextlib.suppress(OSError):  # whatever is in the way is told of when it is
            if _inode(arriving) is not None and _inode(self._spare) in {None, self._own}:
                arriving.replace(self._spare)

    @property
    def is_cheap(self) -> bool:
        """Whether a known snapshot is there that nobody has open: only what has changed need be gone through then."""
        spare = self._take_spare()
        if spare is None:
            return False
        with contextlib.closing(spare):
            return os.fstat(spare.fileno()).st_ino in self._known

    def put(self, descriptor: int) -> Extent:
        """Put a copy of the file behind `descriptor` in place; return how much was gone through. Raises OSError."""
        arriving = beside(self.target, PUBLISHING_SUFFIX)
        sums = checksums(descriptor)
        spare = self._take_spare()
        is_known = spare is not None and os.fstat(spare.fileno()).st_ino in self._known
        try:
            if spare is None:
                copy_through(descriptor, arriving)
                status = arriving.stat()
            else:
                with contextlib.closing(spare):
                    target = spare.fileno()
                    doubtful = self._doubtful(descriptor) if is_known else range(len(sums))
                    of_target = self._sums_of(target) if is_known else []
                    changed = copy_changed(descriptor, target, doubtful, of_target, sums)
                    status = os.fstat(target)  # before anybody else can write to it
                self._changed.update(dict.fromkeys(changed, self._number))
                self._spare.replace(arriving)
            inode = status.st_ino
            self._keep_present_one()
            put_in_place(arriving, self.target)
        except BaseException:
            for left in (arriving, self._spare):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
            raise
        kept = {one: known for one, known in self._known.items() if one == self._own}
        self._known = {**kept, inode: _Known(status.st_mtime_ns, sums)}
        self._own = inode
        return "changed" if is_known else "whole"

    def _doubtful(self, descriptor: int) -> set[int]:
        """Return which blocks are to be compared byte by byte this time."""
        self._number += 1
        oldest = self._number - _LATELY
        self._changed = {block: number for block, number in self._changed.items() if number > oldest}
        blocks = os.fstat(descriptor).st_size // _BLOCK_BYTES + 1
        turn = self._number * _IN_TURN
        return {*self._changed, *(block % blocks for block in range(turn, turn + _IN_TURN))}

    def _sums_of(self, spare: int) -> list[bytes]:
        """Return the checksums in a snapshot: those that it was put in place with, unless it was written to since."""
        status = os.fstat(spare)
        known = self._known.get(status.st_ino)
        return checksums(spare) if known is None or known.modified_ns != status.st_mtime_ns else known.sums

    def _take_spare(self) -> _File | None:
        """Return the snapshot before the last one, open for writing, if nobody else has it open or bears it a name."""
        try:
            spare = _File(os.open(self._spare, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        except OSError:
            return None
        status = os.fstat(spare.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and _is_alone(spare.fileno()):
            return spare
        spare.close()
        # Whoever has it open keeps it; the next to be replaced becomes the spare one.
        return None

    def _keep_present_one(self) -> None:
        """Give the snapshot that is in place a second name, so that it can be the next one's ground."""
        self._spare.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a file system without hard links; every copy is whole then
            if self._own is not None and os.stat(self.target).st_ino == self._own:
                os.link(self.target, self._spare)

    def end(self) -> None:
        """Let go of what is beside the target."""
        for suffix in (SPARE_SUFFIX, PUBLISHING_SUFFIX):
            with contextlib.suppress(OSError):
                beside(self.target, suffix).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Known:
    """A snapshot as it was put in place: when it was written to, unix ns, and its blocks' checksums."""

    modified_ns: int
    sums: list[bytes]


def _inode(path: Path) -> int | None:
    """Return what tells the regular file at a path from others; None where none is."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status.st_ino
    return None


class _File:
    """A descriptor that is closed once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)


def _is_alone(descriptor: int) -> bool:
    """Return True if no other open file, in any process, is the one behind `descriptor`; none is until that closes.

    The kernel grants a lease for writing only then; where it cannot (network file systems) the answer is no. A second
    descriptor of ours shows whether it would have refused.
    """
    if not _lease(descriptor):
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    try:
        second = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _lease(descriptor):
            return False
    finally:
        os.close(second)
    return _lease(descriptor)


def _lease(descriptor: int) -> bool:
    """Return True if a lease for writing was granted; it is held until the descriptor is closed."""
    try:
        # Who opens the file meanwhile waits, and we are told by a signal, whose default would end this process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    return True


def checksums(descriptor: int) -> list[bytes]:
    """Return the checksums of the blocks of the DuckDB file behind `descriptor`, in order."""
    size = os.fstat(descriptor).st_size
    return [os.pread(descriptor, _CHECKSUM_BYTES, at) for at in range(_HEADERS_BYTES, size, _BLOCK_BYTES)]


def copy_changed(
    source: int, target: int, doubtful: Container[int], of_target: list[bytes], of_source: list[bytes]
) -> list[int]:
    """Make the DuckDB file behind `target` that behind `source` and durable; return the numbers of the blocks changed.

    Blocks are told apart by the checksums of both, `doubtful` ones by all that is in them.
    """
    size, there = os.fstat(source).st_size, os.fstat(target).st_size
    changed, ours, theirs = [], bytearray(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)
    for block, checksum in enumerate(of_source):
        at = _HEADERS_BYTES + block * _BLOCK_BYTES
        if at + _BLOCK_BYTES > there:
            is_same = False
        elif block in doubtful:
            # Into memory that is there: to have it anew for each block would take as long again.
            is_same = os.preadv(target, [theirs], at) == os.preadv(source, [ours], at) and ours == theirs
        else:
            is_same = of_target[block] == checksum
        if not is_same:
            _copy_range(source, target, at, min(_BLOCK_BYTES, size - at))
            changed.append(block)
    os.ftruncate(target, size)
    _copy_range(source, target, 0, min(_HEADERS_BYTES, size))
    os.fsync(target)
    return changed


def _copy_range(source: int, target: int, at: int, length: int) -> None:
    block = os.pread(source, length, at)
    if len(block) != length or os.pwrite(target, block, at) != length:
        raise StoreError("a block could not be copied whole")
