"""A store of an older schema made anew: what was recorded is copied, what was worked out is left to be redone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvtrace import __version__, schema
from kvtrace.errors import StoreError
from kvtrace.store import opening
from kvtrace.store.connection import Store
from kvtrace.store.files import CREATING_SUFFIX, UPGRADING_SUFFIX, WAL_SUFFIX, beside, working_path
from kvtrace.store.refusal import said_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import duckdb


@contextlib.contextmanager
def upgrading(path: Path) -> Iterator[Store]:
    """Give a new store that holds what the older one at `path` recorded, and put it in its place behind the block.

    Raises StoreError where there is nothing to upgrade. After an exception the older store is as it was.
    """
    if working_path(path).exists():
        raise StoreError(f"{path} is still being recorded, or its recording was cut off; let `kvtrace record` end it")
    version = opening.schema_version(path)
    if version == schema.SCHEMA_VERSION:
        raise StoreError(f"{path} has schema {version}, which this kvtrace reads: there is nothing to upgrade")
    if version > schema.SCHEMA_VERSION:
        raise StoreError(f"{path} has the newer schema {version}; upgrade kvtrace to read it")
    arriving = beside(path, UPGRADING_SUFFIX)
    _forget(arriving)
    store = Store.open(arriving, "write")
    try:
        with said_plainly(path):
            _copy_recorded(path, store.connection)
        facts = {"kvtrace": __version__, "schema_version": str(schema.SCHEMA_VERSION), "upgraded_from": str(version)}
        store.remember(facts)
        yield store
        store.finish(path)
    except BaseException:
        store.close()
        _forget(arriving)
        raise


def _forget(arriving: Path) -> None:
    for leftover in (arriving, beside(arriving, WAL_SUFFIX), beside(arriving, CREATING_SUFFIX)):
        leftover.unlink(missing_ok=True)


def _copy_recorded(path: Path, connection: duckdb.DuckDBPyConnection) -> None:
    """Copy the recorded tables' columns by name; a column that is new stays NULL."""
    connection.execute(f"ATTACH {schema.text(str(path))} AS older (READ_ONLY)")
    known = connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = 'older' AND NOT internal"
    ).fetchall()
    there = set(known)
    for table in schema.TABLES:
        names = [column.name for column in table.columns if (table.name, column.name) in there]
        if table.name in schema.ANSWERS or not names:
            continue
        listed = ", ".join(schema.quoted(name) for name in names)
        # An ENUM of another file is another type, so a stage goes by its name.
        taken = ", ".join(
            f"{schema.quoted(name)}::VARCHAR" if name == "stage" else schema.quoted(name) for name in names
        )
        connection.execute(f"DELETE FROM {schema.quoted(table.name)}")  # noqa: S608 -- names of ours
        connection.execute(
            f"INSERT INTO {schema.quoted(table.name)} ({listed}) SELECT {taken} FROM older.{schema.quoted(table.name)}"  # noqa: S608 -- names of ours
        )
    connection.execute("DETACH older")
