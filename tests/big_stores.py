"""Stores as large as wanted for benchmarks: one piece of a made-up fleet, analysed in truth, laid end to end."""

# ruff: noqa: S608 -- the statements are made of constants

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import analyze, schema
from kvtrace.store import Store
from kvtrace.testing import Fleet, fill

if TYPE_CHECKING:
    from pathlib import Path

PIECE = Fleet(5_000, per_s=200.0)
_PIECE_NS = int(PIECE.requests / PIECE.per_s * 1e9)
_PER_COPY = 1_000_000  # more than a piece has of steps, transfers or requests
_COUNTED = "CASE WHEN stage::VARCHAR LIKE 'step.%' OR stage::VARCHAR LIKE 'transfer.%' THEN a + n * {per} ELSE a END"
_AT_ONCE = 20
# Of each column that a copy changes: how. Every other one is taken as it is; n is the number of the copy.
_LATER = ("t_ns", "start_ns", "end_ns", "first_token_ns")
_CHANGED = {
    "a": _COUNTED, "request": "CASE WHEN request = '' THEN '' ELSE {of_request} END",
    "ref": "CASE WHEN ref LIKE '%kvt-%' THEN {of_ref} ELSE ref END", "request_id": "{of_request_id}",
    "blamed_request_id": "{of_blamed_request_id}", "request_key": "request_key + n * {per}",
    **{name: f"{name} + n * {{piece}}" for name in _LATER},
}  # fmt: skip


def _renamed(column: str) -> str:
    """Return SQL for an id of a copy: six digits of its middle give way to the number, so that ids stay as long."""
    return f"regexp_replace({column}, 'kvt-.{{6}}', 'kvt-' || printf('%06x', n))"


def write(path: Path, requests: int) -> int:
    """Write a store of at least so many requests with their answers, in order of time; return how many events it has.

    What `keeping` keeps is left to the caller.
    """
    copies = -(-requests // PIECE.requests)
    with Store.open(path, "write") as store:
        events = fill(store, PIECE)
        analyze.analyze(store)
        tables = ["event", *(name for name in schema.ANSWERS)]
        for name in tables:
            store.execute(f"CREATE TEMP TABLE piece_{name} AS FROM {name}")
        for first in range(1, copies, _AT_ONCE):
            for name in tables:
                store.execute(_copies_sql(name, first, min(first + _AT_ONCE, copies)))
        for name in tables:
            store.execute(f"DROP TABLE piece_{name}")
        store.execute("UPDATE process SET first_ns = 0, last_ns = (SELECT max(t_ns) FROM event)")
        store.execute("CHECKPOINT")
    return events * copies


def _copies_sql(table: str, first: int, end: int) -> str:
    """Return the INSERT of some copies of a piece's rows of one table, in order of time."""
    names = [column.name for column in schema.TABLE_BY_NAME[table].columns]
    words: dict[str, object] = {"piece": _PIECE_NS, "per": _PER_COPY}
    words |= {f"of_{name}": _renamed(name) for name in ("request", "ref", "request_id", "blamed_request_id")}
    values = ", ".join(_CHANGED.get(name, schema.quoted(name)).format(**words) for name in names)
    order = "t_ns" if table == "event" else "request_key"
    return f"INSERT INTO {table} SELECT {values} FROM piece_{table}, range({first}, {end}) AS c(n) ORDER BY n, {order}"
