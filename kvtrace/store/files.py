"""The files of a store: published, working, and the names that they have on the way."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtrace.errors import StoreError, is_text

if TYPE_CHECKING:
    from pathlib import Path

WORKING_SUFFIX = ".working"
PUBLISHING_SUFFIX = ".publishing"
SPARE_SUFFIX = ".spare"
CREATING_SUFFIX = ".new"
WAL_SUFFIX = ".wal"
_SUFFIXES = ("", WAL_SUFFIX, PUBLISHING_SUFFIX, SPARE_SUFFIX, CREATING_SUFFIX)

_COPY_STEP_BYTES = 8 * 1024 * 1024
_MAGIC = b"DUCK"
_MAGIC_AT = 8


def is_duckdb(path: Path) -> bool:
    """Return True if a file begins as DuckDB's do. Raises OSError where there is none to read."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return False  # reading a pipe or a terminal would wait for whoever writes to it
    with path.open("rb") as file:
        return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC


def beside(path: Path, suffix: str) -> Path:
    """Return the path with a suffix added to its whole name."""
    return path.with_name(path.name + suffix)


def refuse_bytes(path: Path) -> None:
    """Raise StoreError if a path is no UTF-8, which is all that DuckDB opens."""
    if not is_text(str(path)):
        raise StoreError(f"{path} cannot be a store: its path is no UTF-8; give it another name")


def resolved(path: Path) -> Path:
    """Return where a path leads, links followed; raise StoreError for links that lead back to themselves."""
    try:
        return path.resolve()
    except RuntimeError as error:
        raise StoreError(f"{path} leads nowhere: its links lead back to it; name another file") from error


def working_path(published: Path) -> Path:
    """Return where the recorder keeps the working file of a published store."""
    return beside(published, WORKING_SUFFIX)


def discard(published: Path) -> None:
    """Delete a store, its working file and what either left behind; raise StoreError if another recorder is at it."""
    if _is_locked(working_path(published)):
        raise StoreError(f"{published} is being recorded by another process: stop that first, or name another output")
    if _is_foreign(published):
        raise StoreError(f"{published} is there and no DuckDB file, so it is not overwritten; name another output")
    for base in (published, working_path(published)):
        for suffix in _SUFFIXES:
            beside(base, suffix).unlink(missing_ok=True)


def _is_foreign(path: Path) -> bool:
    """Return True if there is something that holds what no store does; an empty file holds nothing."""
    if path.is_file() and not path.stat().st_size:
        return False
    return path.exists() and not is_duckdb(path)


def is_of(published: Path, other: Path) -> bool:
    """Return True if the other path is that of a store or of one of the files that a recorder keeps beside it."""
    bases = (published, working_path(published))
    return any(beside(base, suffix) == other for base in bases for suffix in _SUFFIXES)


def _is_locked(path: Path) -> bool:
    """Return True if another process has the file open in DuckDB, for writing."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def copy_through(descriptor: int, target: Path) -> None:
    """Copy the whole file behind an open descriptor to `target` and make the copy durable."""
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        size, done = os.fstat(descriptor).st_size, 0
        while done < size:
            count = _copied(descriptor, out, done, size - done)
            if not count:
                raise StoreError(f"{target} could not be copied: its source shrank meanwhile")
            done += count
        os.fsync(out)
    finally:
        os.close(out)


def _copied(source: int, target: int, at: int, length: int) -> int:
    """Copy some of these bytes; return how many, 0 at the end of the source."""
    # Within the kernel it takes less processor time, and next to none where the file system shares blocks.
    with suppress(OSError):  # another file system, or one that cannot, which some say by copying nothing
        if count := os.copy_file_range(source, target, length, at, at):
            return count
    return os.pwrite(target, os.pread(source, min(_COPY_STEP_BYTES, length), at), at)


def put_in_place(arriving: Path, target: Path) -> None:
    """Rename `arriving` to `target`, so that a crash leaves either the old file or the new one."""
    # A program that opened the old file for writing leaves a log that would be replayed into the new file.
    beside(target, WAL_SUFFIX).unlink(missing_ok=True)
    arriving.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
