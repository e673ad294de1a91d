"""Where an export goes: a file that appears whole, a folder, a pipe or a device, stdout; never the store itself."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvtrace.errors import ExportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

STDOUT = Path("-")


@contextlib.contextmanager
def opened(path: Path, store: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open what is to be written, stdout for `STDOUT`. A file appears under its name when it is whole, else not at all.

    A pipe or a device is written to where it is. Raises ExportError for a folder, for `store`, for a file that exists
    unless `force` is given, and for what the system refuses.
    """
    if path == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with _opened(path, store, force=force) as out:
            yield out
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}; name another file with -o") from error


@contextlib.contextmanager
def _opened(path: Path, store: Path, *, force: bool) -> Iterator[BinaryIO]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise ExportError(f"{path} is a folder; name a file with -o")
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as out:
            yield out
        return
    if mode is not None and path.samefile(store):
        raise ExportError(f"{path} is the store that is exported; name another file with -o")
    if mode is not None and not force:
        raise ExportError(f"{path} exists and is not overwritten; use --force or name another file with -o")
    # A link keeps pointing where it does, /dev/stdout too.
    home = path.resolve()
    unfinished = home.with_name(f".kvtrace-{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as out:
            yield out
        unfinished.replace(home)
    finally:
        unfinished.unlink(missing_ok=True)


def check_folder(path: Path, pattern: str, *, force: bool) -> None:
    """Raise unless files can be put into a folder at `path`; those that match `pattern` stand in the way of others."""
    if path == STDOUT:
        raise UsageError("parquet is one file per table: name a folder with -o")
    try:
        is_there = path.exists()
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}; name another folder with -o") from error
    if is_there and not path.is_dir():
        raise ExportError(f"{path} is a file; name a folder with -o")
    if is_there and not force and any(path.glob(pattern)):
        raise ExportError(f"{path} holds Parquet files already and is not overwritten; use --force or another folder")
