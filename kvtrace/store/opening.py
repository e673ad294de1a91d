"""Opening a store: is there a file, is it DuckDB's, is it ours, is it of our schema."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import duckdb

from kvtrace import __version__, schema
from kvtrace.errors import DamageError, StoreError
from kvtrace.messages import command_line
from kvtrace.store.files import CREATING_SUFFIX, WAL_SUFFIX, beside, is_duckdb, refuse_bytes, working_path
from kvtrace.store.refusal import duckdb_version, opened_plainly

_STORAGE_VERSION = "v1.0.0"  # DuckDB 1.x, which Grafana's plug-in embeds, has to read what 2.x wrote
_NAME_ONE = "name a store that a recording wrote; `kvtrace record --help` shows how to make one"
_TRIES = 20
_OWN_FILES = Path("/proc/self/fd")
# A query somebody passes on cannot reach past the store: no other file, no extension, no Python variable.
_CONFINED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


def connect_to_read(
    path: Path, *, memory_bytes: int | None = None, may_write_to: Path | None = None
) -> duckdb.DuckDBPyConnection:
    """Return a connection that can read the store at `path` and can do nothing else, but write files to one folder.

    `memory_bytes` bounds what DuckDB keeps of the store in memory.
    """
    _check_file(path)
    config: dict[str, str | bool | int | float | list[str]] = dict(_CONFINED)
    if memory_bytes is not None:
        config["memory_limit"] = f"{memory_bytes}B"
    if may_write_to is not None:
        del config["enable_external_access"]  # switched off below, once the folder is known
    connection = _connect_to_one(path, config)
    try:
        if may_write_to is not None:
            connection.execute(f"SET allowed_directories = [{schema.text(str(may_write_to))}]")
            connection.execute("SET enable_external_access = false")
        _check_schema(path, connection)
        _keep_quiet(connection)
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET lock_configuration = true")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_one(path: Path, config: dict[str, str | bool | int | float | list[str]]) -> duckdb.DuckDBPyConnection:
    """Return a connection to one snapshot: DuckDB reads the headers of a file and then opens it anew for the rest.

    Where another snapshot was put in place in between, it would take the headers of one for the blocks of the other.
    """
    for _ in range(_TRIES):
        before, held = _identity(path), _kept_open(path)
        try:
            with opened_plainly(path):
                connection = duckdb.connect(str(path), read_only=True, config=config)
        except StoreError:
            if _identity(path) == before:
                raise
            continue
        kept = _kept_open(path).items() - held.items()
        # None: this process has the file open already, or the system does not tell.
        if not kept or before in dict(kept).values():
            return connection
        connection.close()
    raise StoreError(f"{path} is replaced faster than it can be opened; try again")


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells one file under a name from the next, None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _kept_open(path: Path) -> dict[str, tuple[int, int, int] | None]:
    """Return this process's open files that were opened under this name, by descriptor; none where nobody can tell."""
    name, found = os.path.realpath(path), {}
    with suppress(OSError):
        for descriptor in os.listdir(_OWN_FILES):
            own = _OWN_FILES / descriptor
            with suppress(OSError):
                if os.readlink(own) in {name, f"{name} (deleted)"}:
                    found[descriptor] = _identity(own)
    return found


def connect_to_write(path: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection that writes the store at `path`, made if it is missing."""
    refuse_bytes(path)
    if not path.exists():
        _create(path)
    _check_file(path)
    connection = _connect(path)
    try:
        _check_schema(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    with opened_plainly(path):
        connection = duckdb.connect(str(path), config={"storage_compatibility_version": _STORAGE_VERSION})
    _keep_quiet(connection)
    return connection


def _keep_quiet(connection: duckdb.DuckDBPyConnection) -> None:
    """Keep DuckDB from drawing a progress bar on stdout, where only answers belong, during a long query."""
    connection.execute("SET enable_progress_bar = false")


def _create(path: Path) -> None:
    """Make an empty store at `path`; under another name first, so that a crash leaves no half of one."""
    unborn = beside(path, CREATING_SUFFIX)
    try:
        for leftover in (unborn, beside(unborn, WAL_SUFFIX)):
            leftover.unlink(missing_ok=True)
        unborn.touch()
        unborn.unlink()
    except OSError as error:
        raise StoreError(f"{path} cannot be made: {error.strerror}; name another output") from error
    facts = {
        "format": schema.FORMAT,
        "schema_version": str(schema.SCHEMA_VERSION),
        "kvtrace": __version__,
        "duckdb": duckdb_version(),
    }
    try:
        with _connect(unborn) as connection:
            connection.execute("BEGIN TRANSACTION")
            connection.execute(schema.ddl())
            connection.executemany("INSERT INTO run VALUES (?, ?)", list(facts.items()))
            connection.execute("COMMIT")
            connection.execute("CHECKPOINT")
        unborn.replace(path)
    except BaseException:
        for leftover in (unborn, beside(unborn, WAL_SUFFIX)):
            leftover.unlink(missing_ok=True)
        raise


def _check_file(path: Path) -> None:
    """Raise unless a DuckDB file lies at `path`."""
    refuse_bytes(path)
    try:
        is_database, is_empty = is_duckdb(path), path.is_file() and not path.stat().st_size
    except FileNotFoundError as error:
        if working_path(path).exists():
            message = f"{path} has not been published yet; its recorder is still at {working_path(path)}"
            raise StoreError(message) from error
        raise StoreError(f"{path} does not exist; {_NAME_ONE}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    if is_empty:
        raise DamageError(f"{path} is empty; {_NAME_ONE}")
    if not is_database:
        raise StoreError(f"{path} is not a DuckDB file; {_NAME_ONE}")


def schema_version(path: Path) -> int:
    """Return the schema version of the store at `path`, of whatever age; raise StoreError where none lies there."""
    return _version(facts(path))


def facts(path: Path) -> dict[str, str]:
    """Return the run's facts of the store at `path`, of whatever age; raise StoreError where none lies there."""
    _check_file(path)
    with opened_plainly(path):
        connection = duckdb.connect(str(path), read_only=True, config=dict(_CONFINED))
    with connection:
        return _facts(path, connection)


def _facts(path: Path, connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Return the facts of an open file; raise StoreError unless it is a store of ours, of whatever age."""
    facts: dict[str, str] = {}
    # No such table or column: somebody else's file. Asking DuckDB for its columns first would bind every view.
    with opened_plainly(path), suppress(duckdb.CatalogException, duckdb.BinderException):
        facts = dict(connection.execute("SELECT name::VARCHAR, value::VARCHAR FROM run").fetchall())
    if facts.get("format") != schema.FORMAT:
        raise StoreError(f"{path} is a DuckDB file but no kvtrace store; {_NAME_ONE}")
    return facts


def _version(facts: dict[str, str]) -> int:
    version = facts.get("schema_version", "")
    return int(version) if version.isdecimal() else 0


def _check_schema(path: Path, connection: duckdb.DuckDBPyConnection) -> None:
    """Raise unless the open file is a store of ours, of the schema that this kvtrace reads."""
    facts = _facts(path, connection)
    found, ours, writer = _version(facts), schema.SCHEMA_VERSION, facts.get("kvtrace", "?")
    if found == ours:
        return
    step = f"`{command_line('upgrade', path)}` makes it readable" if found < ours else "upgrade kvtrace to read it"
    age = "older" if found < ours else "newer"
    raise StoreError(f"{path} has the {age} schema {found} of kvtrace {writer}; this is schema {ours}: {step}")
