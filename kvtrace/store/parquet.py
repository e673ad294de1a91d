"""Tables of a store as Parquet files, written by DuckDB itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrace import schema
from kvtrace.store import opening
from kvtrace.store.refusal import said_plainly

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MEMORY_BYTES = 512 * 1024 * 1024


def write_tables(store: Path, folder: Path, chosen: Mapping[str, str], params: Mapping[str, Any]) -> dict[str, int]:
    """Write one Parquet file per table into `folder` and return the rows of each.

    `chosen` maps tables to a condition on their rows, in SQL with named parameters that `params` binds; the others are
    written whole. Nothing but this folder can be written to.
    """
    written = {}
    connection = opening.connect_to_read(store, memory_bytes=_MEMORY_BYTES, may_write_to=folder)
    try:
        with said_plainly(store):
            for table in schema.TABLES:
                condition = chosen.get(table.name, "true")
                query = f"SELECT * FROM {schema.quoted(table.name)} WHERE {condition}"  # noqa: S608 -- names and conditions of ours
                target = schema.text(str(folder / f"{table.name}.parquet"))
                used = {name: value for name, value in params.items() if f"${name}" in condition}
                done = connection.execute(
                    f"COPY ({query}) TO {target} (FORMAT parquet, COMPRESSION zstd)", used or None
                )
                written[table.name] = int((done.fetchone() or (0,))[0])
    finally:
        connection.close()
    return written
