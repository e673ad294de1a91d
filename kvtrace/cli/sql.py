"""`kvtrace sql`: a named query or a SELECT of the user's own, as a table, JSON or CSV."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import itertools
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtrace import queries
from kvtrace.cli.signals import interrupted_at_once
from kvtrace.errors import UsageError
from kvtrace.report import selection
from kvtrace.store import Rows, Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtrace.store.connection import Row

_CELL_LETTERS_MAX = 60
_REQUEST, _ATTEMPT = "request", "attempt"
"""Parameters of every query about one request."""
_NUMBER = re.compile(r"(U?(TINY|SMALL|BIG|HUGE)INT|U?INTEGER|FLOAT|DOUBLE|DECIMAL\(\d+,\d+\))(\[\])*")


def command(
    store: Annotated[Path | None, typer.Argument(help="The store, as `kvtrace record` made it.")] = None,
    question: Annotated[list[str] | None, typer.Argument(help="A query's name, or SQL.", metavar="NAME|SELECT")] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", help="A parameter of the query, name=value; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row, in an array.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    names: Annotated[
        bool, typer.Option("--list", help="List the named queries, or what those named answer, and end.")
    ] = False,
) -> None:
    """Ask a store a question in SQL, by a query's name or in full. Nothing it says can change the store."""
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other")
    if names:
        if as_csv:
            raise UsageError("--list has no CSV; --json has all of it")
        _list([*([str(store)] if store is not None else []), *(question or [])], as_json=as_json)
        return
    if store is None or not question:
        raise UsageError("name a store and a query: kvtrace sql RUN.duckdb NAME; --list names the queries")
    with interrupted_at_once(), Store.open(store) as opened:
        statement, values = _statement(opened, " ".join(question), _given(param or []))
        if as_json:
            sys.stdout.writelines(_json(*opened.stream(statement, values)))
        elif as_csv:
            columns, rows = opened.stream(statement, values)
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_plain(value) for value in row] for row in rows)
        else:
            sys.stdout.writelines(_table(opened.select(statement, values)))


def _statement(store: Store, question: str, given: dict[str, str]) -> tuple[str, Mapping[str, object]]:
    """Return the SQL that was asked for and the values of its parameters.

    Raises UsageError where they do not fit, and RequestError where a named query is to be about no request.
    """
    if question in queries.names():
        query = queries.load(question)
        values = query.bind(given)
        if _REQUEST in given:
            selection.require_named(store, given[_REQUEST], values[_ATTEMPT])
        return query.sql, values
    if _is_name(question):
        raise UsageError(f"there is no query {question}; `kvtrace sql --list` names them")
    wanted = store.parameters(question)
    if wanted != given.keys():
        missing = ", ".join(sorted(wanted - given.keys())) or "none"
        excess = ", ".join(sorted(given.keys() - wanted)) or "none"
        raise UsageError(f"parameters do not fit the SELECT: missing {missing}, unknown {excess}")
    return question, given


def _given(pairs: list[str]) -> dict[str, str]:
    given = {}
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not is_pair or not name:
            raise UsageError(f"--param wants name=value, not {pair!r}")
        given[name.removeprefix("$")] = value
    return given


def _is_name(word: str) -> bool:
    """Return whether a word looks like a query's name, and not like SQL or a path."""
    return word.replace("_", "").isalnum()


def _list(words: list[str], *, as_json: bool) -> None:
    """Write what the named queries answer; without names a line each, or all of it as JSON. A path is passed over."""
    wanted = words if not words or _is_name(words[0]) else words[1:]
    known = [queries.load(name) for name in wanted] or queries.load_all()
    if as_json:
        sys.stdout.write("[" + ",".join(f"\n{json.dumps(_documented(query))}" for query in known) + "\n]\n")
    elif wanted:
        sys.stdout.write("\n".join("".join(_described(query)) for query in known))
    else:
        sys.stdout.writelines(_catalogue({query.name: query for query in known}))


def _documented(query: queries.Query) -> dict[str, Any]:
    """Return all that is known of a query but its SQL."""
    group = next((group for group, members in queries.GROUPS.items() if query.name in members), None)
    parameters, columns = (list(map(asdict, some)) for some in (query.parameters, query.columns))
    for column in columns:
        del column["is_needed"]
    return {"name": query.name, "group": group, "title": query.title, "parameters": parameters, "columns": columns}


def _described(query: queries.Query) -> Iterable[str]:
    """Yield a query's title, its parameters and its columns, a line each."""
    yield f"{query.name}: {query.title}\n"
    for heading, described in (("parameters", query.parameters), ("columns", query.columns)):
        yield f"{heading}\n" if described else ""
        names, types = (max((len(getattr(one, of)) for one in described), default=0) for of in ("name", "sql_type"))
        for one in described:
            yield f"  {one.name:<{names}}  {one.sql_type:<{types}}  {'Needed. ' if one.is_needed else ''}{one.doc}\n"


def _catalogue(known: dict[str, queries.Query]) -> Iterable[str]:
    """Yield a line per query, by what they are about."""
    width = max(map(len, known))
    for group, members in queries.GROUPS.items():
        yield f"{group}\n"
        yield from (f"  {name:<{width}}  {known[name].title}\n" for name in members)
    yield "\nThose about one request want --param request=ID. Parameters and columns: kvtrace sql --list NAME\n"


def _json(columns: Iterable[str], rows: Iterable[Row]) -> Iterable[str]:
    """Yield a JSON array, an object per row and line."""
    names = _told_apart(columns)
    yield "["
    for index, row in enumerate(rows):
        yield ",\n" if index else "\n"
        values = {name: _plain(value) for name, value in zip(names, row, strict=True)}
        yield json.dumps(values, ensure_ascii=not sys.stdout.encoding.lower().startswith("utf"))
    yield "\n]\n"


def _told_apart(columns: Iterable[str]) -> list[str]:
    """Return the names, with numbers behind those that come again: an object would keep the last value alone."""
    names: list[str] = []
    for column in columns:
        numbered = (f"{column}_{number}" for number in itertools.count(1))
        names.append(next(name for name in (column, *itertools.islice(numbered, len(names))) if name not in names))
    return names


def _plain(value: Any) -> Any:
    """Return a value that JSON and CSV have: times as ISO 8601, decimals as numbers."""
    if isinstance(value, dt.datetime | dt.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _table(rows: Rows) -> Iterable[str]:
    """Yield aligned columns for a terminal: numbers to the right, long texts cut, control characters shown."""
    if not rows.columns:
        return
    columns = [_cells([row[at] for row in rows.values]) for at in range(len(rows.columns))]
    widths = [max(map(len, [name, *cells])) for name, cells in zip(rows.columns, columns, strict=True)]
    right = [_NUMBER.fullmatch(kind) is not None for kind in rows.types]
    cells = zip(*columns, strict=True)
    for row in [list(rows.columns), ["-" * width for width in widths], *cells]:
        parts = [f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in zip(row, widths, right, strict=True)]
        yield "  ".join(parts).rstrip() + "\n"


def _cells(values: list[Any]) -> list[str]:
    """Return a column's values as text, all with the same number of decimals."""
    moments = [value for value in values if isinstance(value, dt.datetime)]
    timespec = "microseconds" if any(moment.microsecond for moment in moments) else "seconds"
    return [value.isoformat(timespec=timespec) if isinstance(value, dt.datetime) else _cell(value) for value in values]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = _written(value)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _CELL_LETTERS_MAX else shown[: _CELL_LETTERS_MAX - 1] + "…"


def _written(value: Any) -> str:
    """Return a value as text; a decimal has the decimals of its type, and other fractions three, also in lists."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return f"[{', '.join('NULL' if one is None else _written(one) for one in value)}]"
    return str(value if isinstance(value, decimal.Decimal) else _plain(value))
