"""Run in the environment that has the plug-in's DuckDB: open a store read-write as it does, answer the SQL on stdin.

Standard input: JSON, {"path": …, "asked": [sql, …]}. Standard output: JSON, a list of {"columns", "types", "rows"} or
{"error"}; times as unix microseconds.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from typing import Any

import duckdb


def plain(value: Any) -> Any:
    """Return a value that JSON has."""
    if isinstance(value, dt.datetime):
        return round(value.timestamp() * 1_000_000)
    return value if value is None or isinstance(value, (int, float, str, bool)) else str(value)


def answer(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    """Return the answer to one query, or what the database says against it."""
    try:
        result = connection.execute(sql)
        rows = [[plain(value) for value in row] for row in result.fetchall()]
    except duckdb.Error as error:
        return {"error": str(error)}
    return {
        "columns": [c[0] for c in result.description],
        "types": [str(c[1]) for c in result.description],
        "rows": rows,
    }


def main() -> None:
    """Answer everything that stdin asks."""
    request = json.load(sys.stdin)
    connection = duckdb.connect(request["path"])
    connection.execute("SET TimeZone = 'UTC'")
    answers = [answer(connection, sql) for sql in request["asked"]]
    connection.close()
    json.dump({"version": duckdb.__version__, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
