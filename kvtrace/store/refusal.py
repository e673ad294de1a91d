"""DuckDB's errors in our words: one line that names the file, the cause and the next step."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import duckdb

from kvtrace.errors import DamageError, QueryError, StoreError
from kvtrace.store.files import WORKING_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DAMAGE = (duckdb.IOException, duckdb.SerializationException, duckdb.InternalException, duckdb.FatalException)
_NOT_COMMITTED = "Failed to commit: "


def duckdb_version() -> str:
    """Return the version of the DuckDB library."""
    return str(duckdb.__version__)


@contextlib.contextmanager
def opened_plainly(path: Path) -> Iterator[None]:
    """Turn what DuckDB says of a file that it cannot open into one line that says what to do."""
    try:
        yield
    except duckdb.Error as error:
        said = _first_line(error)
        if "onflicting lock" in said or "Could not set lock" in said:
            raise StoreError(_locked(path, said)) from error
        if "version number" in said:
            raise StoreError(f"{path} needs another DuckDB than {duckdb_version()}: {said}") from error
        if "ermission denied" in said:
            raise StoreError(f"{path} cannot be opened: permission denied") from error
        raise DamageError(f"{path} is damaged or cut short and cannot be read ({said})") from error


@contextlib.contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """Turn DuckDB's errors into ours: a damaged file is the store's fault, anything else the query's."""
    try:
        yield
    except _DAMAGE as error:
        raise DamageError(f"{path} cannot be read or written further: {_first_line(error)}") from error
    except duckdb.TransactionException as error:
        if _NOT_COMMITTED not in str(error):
            raise QueryError(_first_line(error)) from error
        cause = _first_line(error).partition(_NOT_COMMITTED)[2]
        raise StoreError(f"{path} cannot be written further: {cause}; see to its folder, then try again") from error
    except duckdb.Error as error:
        raise QueryError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _locked(path: Path, said: str) -> str:
    holder = re.search(r"PID (\d+)", said)
    by = f"process {holder[1]}" if holder else "another process"
    if path.name.endswith(WORKING_SUFFIX):
        published = path.with_name(path.name.removesuffix(WORKING_SUFFIX))
        return f"{path} is still being written by {by}; its published snapshot is {published}"
    return f"{path} is held open for writing by {by}; close that program, or copy the file and open the copy"
