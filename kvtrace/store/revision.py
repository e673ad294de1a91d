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
    resolved,
    working_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Identity = tuple[int, int, int]
_ARRIVING = ".arriving-"


def _refuse_recording(path: Path) -> None:
    """Raise if a recorder writes the store at `path`, or has left it unfinished, or if that is a folder."""
    _refuse_folder(path)
    working = next((one for one in map(working_path, (path, resolved(path))) if one.exists()), None)
    if working is not None:
        raise StoreError(
            f"{path} is being recorded ({working} is there): stop its recorder first; "
            "one that was killed is completed by the command that it named when it began"
        )


def identity(path: Path) -> Identity:
    """Return what tells this version of a file from any other; raise StoreError where there is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def unattended(path: Path) -> Identity:
    """Return what the store at `path` is now; raise if a recorder or another program has a hand in it."""
    _refuse_recording(path)
    refuse_changes(path)
    return identity(path)


def refuse_changes(path: Path) -> None:
    """Raise if another program has left changes beside the store at `path`, or if that is a folder."""
    _refuse_folder(path)
    log = beside(resolved(path), WAL_SUFFIX)
    if log.exists() and log.stat().st_size:
        raise StoreError(f"{path} has changes of another program in {log}: open it once with duckdb, then try again")


def _refuse_folder(path: Path) -> None:
    """Raise if the path is that of a folder: some, as `.`, have no name that a suffix could be added to."""
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a store in it")


@contextlib.contextmanager
def revised(path: Path, seen: Identity | None = None) -> Iterator[Store]:
    """Open a copy of the store at `path` for writing; it takes the store's place at the end, after an error never.

    `seen` is the version that the caller has opened and read already; another one is left alone.
    """
    before = unattended(path)
    if seen is None:
        Store.open(path).close()  # whatever it is refused for is said of its own name, and not of the copy's
    elif seen != before:
        raise _changed(path)
    with successor(path, before, copied=True) as store:
        yield store


@contextlib.contextmanager
def successor(path: Path, before: Identity, *, copied: bool = False) -> Iterator[Store]:
    """Open a new store for writing, or a copy; at the end it takes the place of the one at `path`, else never.

    Raises StoreError, and leaves everything as it is, if that one is not the one of `before` any more.
    """
    target = resolved(path)
    arriving = _unfinished(target)
    with _written(path, arriving, target if copied else None) as store:
        yield store
        store.execute("CHECKPOINT")
        store.close()
        _refuse_recording(path)
        if identity(target) != before:
            raise _changed(path)
        with _explained(path):
            arriving.chmod(stat.S_IMODE(os.stat(target).st_mode))
            put_in_place(arriving, target)


def _changed(path: Path) -> StoreError:
    return StoreError(f"{path} was changed by another program meanwhile and is left as that left it; try again")


@contextlib.contextmanager
def created(path: Path, *, force: bool) -> Iterator[Store]:
    """Open a new store for writing; it gets the name `path` at the end, after an error never."""
    refuse_bytes(path)
    if not path.parent.is_dir():
        raise StoreError(f"{path.parent} is not a folder; make it, or name another output")
    _refuse_recording(path)
    if path.exists():
        if not force:
            raise _taken(path)
        opening.schema_version(path)  # only a store is overwritten
    target = resolved(path)
    arriving = _unfinished(target)
    with _written(path, arriving) as store:
        yield store
        store.execute("CHECKPOINT")
        store.close()
        with _explained(path):
            if force:
                put_in_place(arriving, target)
            else:
                try:
                    os.link(arriving, target)  # unlike a rename, never over a file that came meanwhile
                except FileExistsError as error:
                    raise _taken(path) from error


def _taken(path: Path) -> StoreError:
    return StoreError(f"{path} exists and is not overwritten; use --into to add to it, or --force")


@contextlib.contextmanager
def _written(path: Path, arriving: Path, source: Path | None = None) -> Iterator[Store]:
    """Open the file on the way, a copy of `source` if there is one; see to it that nothing of it is left behind."""
    try:
        with _explained(path):
            if source is not None:
                _copy(source, arriving)
            with Store.open(arriving, "write") as store:
                yield store
    finally:
        _remove(arriving)


def _copy(source: Path, target: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy_through(descriptor, target)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror}; it is as it was") from error


def _unfinished(target: Path) -> Path:
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


def _remove(arriving: Path) -> None:
    for base in (arriving, beside(arriving, CREATING_SUFFIX)):
        for suffix in ("", WAL_SUFFIX):
            beside(base, suffix).unlink(missing_ok=True)
