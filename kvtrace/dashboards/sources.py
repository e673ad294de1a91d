"""What a panel asks: a named query of `queries/` with Grafana's variables bound, or a PromQL expression.

Every value that a user can type or a link can carry is written as `${name:sqlstring}`, which Grafana quotes. Times go
in as `${__from:raw}` in ms: the plug-in's own time macros cut them to whole seconds, longer than a request takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvtrace import queries
from kvtrace.errors import QueryError

DUCKDB = "motherduck-duckdb-datasource"
PROMETHEUS = "prometheus"
SOURCE_VARIABLE = "run"
FORMAT_TABLE = 1
FORMAT_TRACE = 3


def text_of(variable: str) -> str:
    """Return SQL for what a variable holds, NULL if nothing; Grafana's format escapes `"`, which is undone."""
    return f"""nullif(replace(CAST(${{{variable}:sqlstring}} AS VARCHAR), '\\"', '"'), '')"""


def _number(variable: str, sql_type: str) -> str:
    return f"TRY_CAST(${{{variable}:sqlstring}} AS {sql_type})"


BINDINGS: Mapping[str, str] = {
    "mode": text_of("mode"),
    "scope": text_of("scope"),
    "prefill": text_of("prefill"),
    "decode": text_of("decode"),
    "engine": "CAST(NULL AS VARCHAR)",
    "limit": "50",
    "request": text_of("request"),
    "attempt": _number("attempt", "INTEGER"),
    "ttft_target_ms": _number("ttft_target_ms", "DOUBLE"),
    "tpot_target_ms": _number("tpot_target_ms", "DOUBLE"),
    "from_ns": "(CAST(${__from:raw} AS BIGINT) * 1000000)",
    "to_ns": "((CAST(${__to:raw} AS BIGINT) + 1) * 1000000)",
    "bucket_ns": "(CAST(${__interval_ms:raw} AS BIGINT) * 1000000)",
}
"""What stands in a panel for each parameter of a query. The end of the range is the end of its last millisecond."""

ALL = "NULL"
"""What a variable's choice "All" puts in: no selection, as in a query whose parameter is not given."""


def panel_sql(name: str, columns: Sequence[str] = (), given: Mapping[str, str] | None = None) -> str:
    """Return the SQL of a panel: the query with its parameters bound, and of its columns those named.

    `given` are SQL literals in place of Grafana's variables. Raises QueryError where the query lacks a column.
    """
    query = queries.load(name)
    bindings = {**BINDINGS, **(given or {})}
    missing = [column for column in columns if column not in {known.name for known in query.columns}]
    if missing:
        raise QueryError(f"query {name} has no column {', '.join(missing)}")
    bound = re.sub(r"\$(\w+)", lambda found: bindings[found[1]], query.sql)
    if not columns or list(columns) == [column.name for column in query.columns]:
        return bound
    chosen = ", ".join(f'"{column}"' for column in columns)
    return f"SELECT {chosen} FROM (\n{bound}\n)"  # noqa: S608 -- columns of ours, checked above


def duckdb_source() -> dict[str, str]:
    """Return the reference to the data source that the variable `run` names."""
    return {"type": DUCKDB, "uid": f"${{{SOURCE_VARIABLE}}}"}


def duckdb_target(sql: str, data_format: int = FORMAT_TABLE) -> dict[str, Any]:
    """Return a target of the DuckDB plug-in.

    Always a table, time series too: as a time series no rows would be an error, as a table they are an empty panel.
    """
    return {
        "refId": "A",
        "datasource": duckdb_source(),
        "rawSql": sql,
        "format": data_format,
        "editorMode": "code",
        "rawQuery": True,
    }


def prometheus_source() -> dict[str, str]:
    """Return the reference to the Prometheus that the variable `prometheus` names."""
    return {"type": PROMETHEUS, "uid": "${prometheus}"}


def prometheus_target(position: int, expression: str, legend: str, *, instant: bool = False) -> dict[str, Any]:
    """Return a target of Grafana's Prometheus data source, the `position`-th of its panel."""
    return {
        "refId": chr(ord("A") + position),
        "datasource": prometheus_source(),
        "expr": expression,
        "legendFormat": legend,
        "range": not instant,
        "instant": instant,
        "editorMode": "code",
    }
