"""An open store: reading, appending, publishing. One connection, to be used by one thread at a time."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvtrace import schema
from kvtrace.errors import QueryError, StoreError, is_text
from kvtrace.store import opening
from kvtrace.store.files import put_in_place
from kvtrace.store.publication import Publication
from kvtrace.store.refusal import said_plainly

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import duckdb
    import pyarrow as pa

    from kvtrace.store.publication import Extent

Mode = Literal["read", "write"]
Row = tuple[Any, ...]
_BATCH_ROWS = 2048  # DuckDB's own vectors are of this length


@dataclass(frozen=True, slots=True)
class Rows:
    """What a query returned: column names, their SQL types, and the rows in order."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    values: list[tuple[Any, ...]]


class Store:
    """An open store. Use `Store.open`; one connection, to be used by one thread at a time."""

    def __init__(self, path: Path, connection: duckdb.DuckDBPyConnection, descriptor: int | None) -> None:
        self.path = path
        self._connection = connection
        self._descriptor = descriptor
        self._publications: dict[Path, Publication] = {}
        self._arrow_schemas: dict[str, pa.Schema] = {}

    @classmethod
    def open(cls, path: str | Path, mode: Mode = "read", *, memory_bytes: int | None = None) -> Store:
        """Return the store at `path`: "read" opens what is there, "write" makes it first if it is missing.

        `memory_bytes` bounds what a reader keeps of the store in memory.
        """
        path = Path(path)
        if mode == "read":
            return cls(path, opening.connect_to_read(path, memory_bytes=memory_bytes), None)
        connection = opening.connect_to_write(path)
        # DuckDB's POSIX lock is lost as soon as *any* descriptor of the file is closed in this process: the file is
        # read through this one only, which stays open as long as the connection.
        return cls(path, connection, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """Return DuckDB's own connection, for what this package does beyond single statements."""
        return self._connection

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what was committed stays. May be called twice."""
        self._connection.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # Reading ------------------------------------------------------------------------------------------

    def select(self, sql: str, params: Mapping[str, Any] | None = None) -> Rows:
        """Return what one statement returns, with names and types; parameters are bound, never pasted."""
        _refuse_bytes(sql, *(params or {}).values())
        with said_plainly(self.path):
            result = self._connection.execute(sql, dict(params) if params else None)
            description = result.description or []
            values = result.fetchall() if description else []
        return Rows(tuple(c[0] for c in description), tuple(_type_name(c[1]) for c in description), values)

    def stream(self, sql: str, params: Mapping[str, Any] | None = None) -> tuple[tuple[str, ...], Iterator[Row]]:
        """Return what one statement returns as it comes: column names, and the rows, which need not fit into memory.

        Until the last one has been taken, the store can be asked nothing else.
        """
        _refuse_bytes(sql, *(params or {}).values())
        with said_plainly(self.path):
            result = self._connection.execute(sql, dict(params) if params else None)
            description = result.description or []
        return tuple(c[0] for c in description), self._coming(result) if description else iter(())

    def _coming(self, result: duckdb.DuckDBPyConnection) -> Iterator[Row]:
        rows: list[Row] | None = None
        while rows is None or rows:
            with said_plainly(self.path):
                rows = result.fetchmany(_BATCH_ROWS)
            yield from rows

    def rows(self, sql: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return what one statement returns, a dict per row."""
        result = self.select(sql, params)
        return [dict(zip(result.columns, row, strict=True)) for row in result.values]

    def arrow(self, sql: str, params: Mapping[str, Any] | None = None) -> pa.Table:
        """Return what one SELECT returns as an Arrow table."""
        with said_plainly(self.path):
            return self._connection.sql(sql, params=dict(params) if params else None).to_arrow_table()

    def arrow_schema(self, table: str) -> pa.Schema:
        """Return the Arrow schema of one of the store's tables, which stays what it is while the store is open."""
        _known(table)
        if table not in self._arrow_schemas:
            empty = self.arrow(f"SELECT * FROM {schema.quoted(table)} LIMIT 0")  # noqa: S608 -- a name of ours
            self._arrow_schemas[table] = empty.schema
        return self._arrow_schemas[table]

    def parameters(self, sql: str) -> set[str]:
        """Return the names of the parameters in `sql`, which must be exactly one statement."""
        _refuse_bytes(sql)
        with said_plainly(self.path):
            statements = self._connection.extract_statements(sql)
        if len(statements) != 1:
            raise QueryError(f"one statement is expected and {len(statements)} were given: ask them one at a time")
        return set(statements[0].named_parameters)

    # Writing ------------------------------------------------------------------------------------------

    def execute(self, sql: str, params: Mapping[str, Any] | None = None) -> None:
        """Run one statement that changes the store."""
        with said_plainly(self.path):
            self._connection.execute(sql, dict(params) if params else None)

    def append(self, table: str, batch: pa.Table) -> None:
        """Append rows to one of the store's tables; columns meet by name, those not given are NULL."""
        _known(table)
        names = ", ".join(schema.quoted(name) for name in batch.column_names)
        with said_plainly(self.path):
            self._connection.register("arriving", batch)
            try:
                self._connection.execute(f"INSERT INTO {schema.quoted(table)} ({names}) SELECT {names} FROM arriving")  # noqa: S608 -- names of ours
            finally:
                self._connection.unregister("arriving")

    def append_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows given as mappings of all columns."""
        import pyarrow as pa  # costs readers, who append nothing, a quarter of a second

        if listed := list(rows):
            self.append(table, pa.Table.from_pylist(listed, schema=self.arrow_schema(table)))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the statements inside one transaction: all of them, or after an exception none."""
        self.execute("BEGIN TRANSACTION")
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._connection.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def remember(self, facts: Mapping[str, str]) -> None:
        """Write facts of the run, each in place of an earlier value of that name."""
        if facts:
            names = sorted(facts)
            self.execute("DELETE FROM run WHERE name IN (SELECT unnest($names))", {"names": names})
            values = [facts[name] for name in names]
            self.execute(
                "INSERT INTO run (name, value) SELECT unnest($names), unnest($values)",
                {"names": names, "values": values},
            )

    def next_request_key(self) -> int:
        """Return a request key that no stored request has."""
        return int(self.select("SELECT coalesce(max(request_key), 0) + 1 FROM request").values[0][0])

    def forget_requests(self, request_ids: Iterable[str], from_ns: int = 0) -> list[int]:
        """Delete the answers for the requests of these ids; return when those began, unix ns.

        What began before `from_ns` (unix ns) stays.
        """
        given = {"ids": list(request_ids), "from": from_ns}
        which = "FROM request WHERE request_id IN (SELECT unnest($ids)) AND coalesce(start_ns, $from) >= $from"
        found = self.select(f"SELECT start_ns {which}", given)
        began_ns = [row[0] for row in found.values if row[0] is not None]
        for table in schema.ANSWERS:
            self.execute(f"DELETE FROM {table} WHERE request_key IN (SELECT request_key {which})", given)  # noqa: S608 -- names of ours
        return began_ns

    # Publishing ---------------------------------------------------------------------------------------

    def publish(self, target: Path, *, whole: bool = True) -> Extent | None:
        """Put a snapshot of this store at `target`, atomically; readers of the one before keep it.

        Returns how much of the store was copied; without `whole` None, and nothing is published, if that would have to
        be all of it.
        """
        if self._descriptor is None:
            raise StoreError(f"{self.path} is open for reading only and cannot be published")
        try:
            publication = self._publications.get(target)
            if publication is None:
                publication = self._publications[target] = Publication(target)
            if not whole and not publication.is_cheap:
                return None
            self.execute("CHECKPOINT")
            return publication.put(self._descriptor)
        except OSError as error:
            raise StoreError(f"{target} could not be published: {error.strerror}; the recording goes on") from error

    def is_cheap_to_publish(self, target: Path) -> bool:
        """Return whether a snapshot is at hand that only what has changed need be copied into."""
        publication = self._publications.get(target)
        return publication is not None and publication.is_cheap

    def used_bytes(self) -> int:
        """Return how many bytes of the file hold something; what was deleted counts no more."""
        return int(self.select("SELECT used_blocks * block_size FROM pragma_database_size()").values[0][0])

    def finish(self, target: Path) -> None:
        """Close this store and give it its published name."""
        self.execute("CHECKPOINT")
        self.close()
        try:
            put_in_place(self.path, target)
        except OSError as error:
            message = f"{target} could not be put in place: {error.strerror}; the whole recording is in {self.path}"
            raise StoreError(message) from error
        with contextlib.suppress(OSError):  # what cannot be cleared away keeps no recording from being whole
            self._publications.setdefault(target, Publication(target))
        for publication in self._publications.values():
            publication.end()


def _known(table: str) -> None:
    if table not in schema.TABLE_BY_NAME:
        raise StoreError(f"the store has no table {table}")


def _refuse_bytes(*texts: object) -> None:
    """Raise QueryError for a text that is no UTF-8: DuckDB knows no other, so nothing stored can match it."""
    for text in texts:
        if isinstance(text, str) and not is_text(text):
            raise QueryError(f"{text!r} is no UTF-8, as every text in a store is; ask for something else")


def _type_name(duckdb_type: Any) -> str:
    """Return the SQL name of a result column's type; an ENUM by its own name, which is shorter than its values."""
    name = str(duckdb_type)
    return "stage" if name.startswith("ENUM(") else name
