"""A store that is changed as a whole: a copy beside it is completed and takes its place, or nothing happens."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from kvtrace.errors import StoreError
from kvtrace.store.connection import Store
from kvtrace.store.files import CREATING_SUFFIX, WAL_SUFFIX, beside, copy_through, put_in_place, working_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def refuse_recording(path: Path) -> None:
    """Raise if a recorder writes the store at `path`, or has left it unfinished."""
    working = next((one for one in map(working_path, (path, path.resolve())) if one.exists()), None)
    if working is not None:
        raise StoreError(
            f"{path} is being recorded ({working} is there): stop its recorder first; "
            f"one that was killed is completed by `kvtrace record -o {path}`"
        )


@contextlib.contextmanager
def revised(path: Path) -> Iterator[Store]:
    """Open a copy of the store at `path` for writing; it takes the store's place at the end, after an error never."""
    refuse_recording(path)
    Store.open(path).close()
    target = path.resolve()
    copy = _unfinished(target)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor)
        with _explained(path):
            copy_through(descriptor, copy)
            copy.chmod(stat.S_IMODE(before.st_mode))
    except BaseException:
        _remove(copy)
        raise
    finally:
        os.close(descriptor)
    with _written(path, copy) as store:
        yield store
        store.execute("CHECKPOINT")
        store.close()
        refuse_recording(path)
        if _identity(os.stat(target)) != _identity(before):
            raise StoreError(f"{path} was changed by another program meanwhile and is left as that left it; try again")
        put_in_place(copy, target)


@contextlib.contextmanager
def created(path: Path, *, force: bool) -> Iterator[Store]:
    """Open a new store for writing; it gets the name `path` at the end, after an error never."""
    if not path.parent.is_dir():
        raise StoreError(f"{path.parent} is not a folder; make it, or name another output")
    refuse_recording(path)
    if path.exists() and not force:
        raise StoreError(f"{path} exists and is not overwritten; use --into to add to it, or --force")
    target = path.resolve()
    copy = _unfinished(target)
    _remove(copy)
    with _written(path, copy) as store:
        yield store
        store.execute("CHECKPOINT")
        store.close()
        put_in_place(copy, target)


@contextlib.contextmanager
def _written(path: Path, copy: Path) -> Iterator[Store]:
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


def _unfinished(target: Path) -> Path:
    return beside(target, f".importing-{os.getpid()}")


def _remove(copy: Path) -> None:
    for base in (copy, beside(copy, CREATING_SUFFIX)):
        for suffix in ("", WAL_SUFFIX):
            beside(base, suffix).unlink(missing_ok=True)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size
