"""A store that is changed as a whole: a copy beside it is completed and takes its place, or nothing happens."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from typing import TYPE_CHECKING

from kvtrace.errors import StoreError
from kvtrace.store import opening
from kvtrace.store.connection import Store
from kvtrace.store.files import (
    CREATING_SUFFIX,
    WAL_SUFFIX,
    beside,
    copy_through,
    put_in_place,
    refuse_bytes,
    working_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Identity = tuple[int, int, int]
_ARRIVING = ".arriving-"


def refuse_recording(path: Path) -> None:
    """Raise if a recorder writes the store at `path`, or has left it unfinished."""
    working = next((one for one in map(working_path, (path, path.resolve())) if one.exists()), None)
    if working is not None:
        raise StoreError(
            f"{path} is being recorded ({working} is there): stop its recorder first; "
            f"one that was killed is completed by `kvtrace record -o {path}`"
        )


def identity(path: Path) -> Identity:
    """Return what tells this version of a file from any other; raise StoreError where there is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def refuse_log(path: Path) -> None:
    """Raise if a program has left changes of the store in a write-ahead log, which would be lost with the file."""
    log = beside(path.resolve(), WAL_SUFFIX)
    if log.exists() and log.stat().st_size:
        raise StoreError(f"{path} has changes of another program in {log}: open it once with duckdb, then try again")


@contextlib.contextmanager
def revised(path: Path, seen: Identity | None = None) -> Iterator[Store]:
    """Open a copy of the store at `path` for writing; it takes the store's place at the end, after an error never.

    `seen` is the version that the caller has read already; another one is left alone.
    """
    refuse_recording(path)
    refuse_log(path)
    Store.open(path).close()
    target = path.resolve()
    before = seen or identity(target)
    copy = unfinished(target)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _explained(path):
            copy_through(descriptor, copy)
    except BaseException:
        _remove(copy)
        raise
    finally:
        os.close(descriptor)
    with written(path, copy) as store:
        yield store
        replace(path, store, copy, before)


def replace(path: Path, store: Store, copy: Path, before: Identity) -> None:
    """Put the finished store at `copy` in the place of the one at `path`, if that is still the one of `before`."""
    target = path.resolve()
    store.execute("CHECKPOINT")
    store.close()
    refuse_recording(path)
    if identity(target) != before:
        raise StoreError(f"{path} was changed by another program meanwhile and is left as that left it; try again")
    with _explained(path):
        copy.chmod(stat.S_IMODE(os.stat(target).st_mode))
        put_in_place(copy, target)


@contextlib.contextmanager
def created(path: Path, *, force: bool) -> Iterator[Store]:
    """Open a new store for writing; it gets the name `path` at the end, after an error never."""
    refuse_bytes(path)
    if not path.parent.is_dir():
        raise StoreError(f"{path.parent} is not a folder; make it, or name another output")
    refuse_recording(path)
    if path.exists():
        if not force:
            raise _taken(path)
        opening.schema_version(path)  # only a store is overwritten
    target = path.resolve()
    copy = unfinished(target)
    with written(path, copy) as store:
        yield store
        store.execute("CHECKPOINT")
        store.close()
        with _explained(path):
            if force:
                put_in_place(copy, target)
            else:
                try:
                    os.link(copy, target)  # unlike a rename, never over a file that came meanwhile
                except FileExistsError as error:
                    raise _taken(path) from error


def _taken(path: Path) -> StoreError:
    return StoreError(f"{path} exists and is not overwritten; use --into to add to it, or --force")


@contextlib.contextmanager
def written(path: Path, copy: Path) -> Iterator[Store]:
    """Open the file on the way, and see to it that nothing of it is left behind."""
    try:
        with _explained(path), Store.open(copy, "write") as store:
            yield store
    finally:
        _remove(copy)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror}; it is as it was") from error


def unfinished(target: Path) -> Path:
    """Return a name for this process's file on the way to `target`; what killed processes left is removed."""
    for left in target.parent.glob(f"{glob.escape(target.name)}{_ARRIVING}*"):
        pid = left.name.rpartition("-")[2].partition(".")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or not _lives(int(pid))):
            left.unlink(missing_ok=True)
    return beside(target, f"{_ARRIVING}{os.getpid()}")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _remove(copy: Path) -> None:
    for base in (copy, beside(copy, CREATING_SUFFIX)):
        for suffix in ("", WAL_SUFFIX):
            beside(base, suffix).unlink(missing_ok=True)
