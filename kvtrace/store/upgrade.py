"""A store of an older schema made anew: what was recorded is copied, what was worked out is left to be redone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvtrace import __version__, schema
from kvtrace.errors import StoreError
from kvtrace.messages import quoted
from kvtrace.store import opening
from kvtrace.store.amounts import count_impossible
from kvtrace.store.connection import Store
from kvtrace.store.refusal import said_plainly
from kvtrace.store.revision import refuse_changes, successor, unattended

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import duckdb


def is_current(path: Path) -> bool:
    """Return whether the store at `path` is as this kvtrace writes it; raise StoreError where none lies there.

    One of the present schema is not where it holds amounts that nothing has, which earlier versions took in.
    """
    refuse_changes(path)
    if opening.schema_version(path) != schema.SCHEMA_VERSION:
        return False
    with Store.open(path) as store:
        return not count_impossible(store)


@contextlib.contextmanager
def upgrading(path: Path) -> Iterator[Store]:
    """Give a new store that holds what the older one at `path` recorded, and put it in its place behind the block.

    Raises StoreError where there is nothing to upgrade. After an exception the older store is as it was.
    """
    before, version = unattended(path), opening.schema_version(path)
    if version == schema.SCHEMA_VERSION and is_current(path):
        raise StoreError(f"{path} has schema {version}, which this kvtrace reads: there is nothing to upgrade")
    if version > schema.SCHEMA_VERSION:
        raise StoreError(f"{path} has the newer schema {version}; upgrade kvtrace to read it")
    with successor(path, before) as store:
        with said_plainly(path):
            _copy_recorded(path.resolve(), store.connection)
        facts = {"kvtrace": __version__, "schema_version": str(schema.SCHEMA_VERSION), "upgraded_from": str(version)}
        store.remember(facts)
        yield store


def _copy_recorded(path: Path, connection: duckdb.DuckDBPyConnection) -> None:
    """Copy the recorded tables' columns by name; a column that is new stays NULL."""
    attached = f"{path.stem} before"  # never the new one's, which is that of its file
    older = schema.quoted(attached)
    connection.execute(f"ATTACH {schema.text(str(path))} AS {older} (READ_ONLY)")
    known = connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = $name AND NOT internal",
        {"name": attached},
    ).fetchall()
    there = set(known)
    for name in ("event", "process"):
        if name not in {table for table, _ in there}:
            raise StoreError(f"{path} lacks table {name}, so nothing can be worked out from it: it is left as it is")
    _refuse_incomplete(path, connection, there, older)
    for table in schema.TABLES:
        names = [column.name for column in table.columns if (table.name, column.name) in there]
        if table.name in schema.WORKED_OUT or not names:
            continue
        listed = ", ".join(schema.quoted(name) for name in names)
        # An ENUM of another file is another type, so a stage goes by its name.
        taken = ", ".join(
            f"{schema.quoted(name)}::VARCHAR" if name == "stage" else schema.quoted(name) for name in names
        )
        connection.execute(f"DELETE FROM {schema.quoted(table.name)}")  # noqa: S608 -- names of ours
        source = f"{older}.{schema.quoted(table.name)}"
        connection.execute(f"INSERT INTO {schema.quoted(table.name)} ({listed}) SELECT {taken} FROM {source}")  # noqa: S608 -- names of ours
    connection.execute(f"DETACH {older}")


def _refuse_incomplete(
    path: Path, connection: duckdb.DuckDBPyConnection, there: set[tuple[str, str]], older: str
) -> None:
    """Raise if an event lacks a value, or is of a stage that nobody knows: nothing can be worked out from it."""
    event = schema.TABLE_BY_NAME["event"]
    for column in event.columns:
        if (event.name, column.name) not in there:
            raise StoreError(f"{path} lacks column {column.name} of table {event.name}: it is left as it is")
        name = schema.quoted(column.name)
        wrong = f"{name} IS NULL"
        if column.sql_type == "stage":
            wrong = f"TRY_CAST({name}::VARCHAR AS stage) IS NULL"
        first = connection.execute(
            f"SELECT count(*) OVER (), rowid, {name}::VARCHAR FROM {older}.event WHERE {wrong} ORDER BY rowid LIMIT 1"  # noqa: S608 -- names of ours
        ).fetchone()
        if first is not None:
            count, row, value = first
            others = f" (and {count - 1} more)" if count > 1 else ""
            if value is None:
                found, such = f"{column.name} is NULL", f"{column.name} IS NULL"
            else:
                found, such = f"{value!r} is no stage that this kvtrace knows", f"stage = {schema.text(value)}"
            taking = f"DELETE FROM {event.name} WHERE {such}"  # noqa: S608 -- shown only
            remedy = " ".join(map(quoted, ("duckdb", str(path), taking)))
            raise StoreError(
                f"{path}: table {event.name}, row {row}{others}: {found}; the store is left as it is: "
                f"take such rows out by `{remedy}`, or record the run again"
            )
