"""What tables and views are made of, and how names and texts are written in SQL."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One column: name, SQL type, a sentence."""

    name: str
    sql_type: str
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the store: its name, a sentence, its columns in order."""

    name: str
    doc: str
    columns: tuple[Column, ...]


def columns(*rows: tuple[str, str, str]) -> tuple[Column, ...]:
    """Return columns from (name, SQL type, sentence) rows."""
    return tuple(Column(name, sql_type, doc) for name, sql_type, doc in rows)


@dataclass(frozen=True, slots=True)
class View:
    """One view: name, a sentence, its SELECT, and its columns in order (checked against the SELECT by a test)."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    sql: str


def quoted(name: str) -> str:
    """Return `name` as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Return `value` as a SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def at_time(column: str) -> str:
    """Return SQL for the TIMESTAMPTZ of a column in unix ns (whole microseconds, exact in a double)."""
    return f"to_timestamp(({column} // 1000) / 1e6)"


def median_ns(times: str, where: str = "TRUE") -> str:
    """Return SQL for the median of an expression in ns, over the rows where a condition holds; NULL for none.

    It lies between the two in the middle, as in all of `queries/`, rounded to whole ns.
    """
    return quantile_ns(times, 0.5, where)


def quantile_ns(times: str, quantile: float, where: str = "TRUE") -> str:
    """Return SQL for a quantile (0 to 1) of an expression in ns, as `median_ns` does for the median."""
    return f"(quantile_cont({times}, {quantile}) FILTER ({where}))::BIGINT"
