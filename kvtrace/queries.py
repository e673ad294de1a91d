r"""Queries by name: one question a file in `queries/`, its header its documentation.

A header is a title line, then `-- $name TYPE sentence` per parameter and `-- name  TYPE  sentence` per column of
the answer. The database checks both: parameters are bound by name, and a test runs every query on an empty store.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtrace.errors import QueryError

_TYPES = r"[A-Z]+(?: WITH TIME ZONE)?(?:\[\])?"
_PARAMETER = re.compile(rf"-- \$(\w+)\s+({_TYPES})\s+(\S.*)")
_COLUMN = re.compile(rf"-- (\w+)\s+({_TYPES})\s+(\S.*)")


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter or a column: name, SQL type, a sentence."""

    name: str
    sql_type: str
    doc: str


@dataclass(frozen=True, slots=True)
class Query:
    """One named query: its title, its parameters, the columns of its answer, its SQL."""

    name: str
    title: str
    parameters: tuple[Described, ...]
    columns: tuple[Described, ...]
    sql: str

    def bind(self, given: dict[str, str]) -> dict[str, object]:
        """Return a value for every parameter: the text given, read as its type, or None."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                has = ", ".join(known) or "none"
                raise QueryError(f"query {self.name} has no parameter {name}; it has {has}")
        return {name: typed(p, given[name]) if name in given else None for name, p in known.items()}


def typed(parameter: Described, text: str) -> object:
    """Return `text` as a value of the parameter's type."""
    try:
        if parameter.sql_type in {"BIGINT", "INTEGER"}:
            return int(text)
        if parameter.sql_type == "DOUBLE":
            return float(text)
    except ValueError as error:
        raise QueryError(f"parameter {parameter.name} wants a {parameter.sql_type}, not {text!r}") from error
    return text


def names() -> list[str]:
    """Return the names of all queries."""
    return sorted(path.stem for path in _folder().glob("*.sql"))


def load(name: str) -> Query:
    """Return the query of that name."""
    path = _folder() / f"{name}.sql"
    if name not in names():
        raise QueryError(f"there is no query {name}; `kvtrace sql --list` names them")
    return parse(name, path.read_text("utf-8"))


def load_all() -> list[Query]:
    """Return all queries in the order of their names."""
    return [load(name) for name in names()]


def parse(name: str, text: str) -> Query:
    """Return the query that a file's text holds."""
    header: list[str] = []
    body: list[str] = []
    for line in text.splitlines():
        (header if line.startswith("--") and not body else body).append(line)
    if not header or not header[0].removeprefix("--").strip():
        raise QueryError(f"query {name} has no title: its first line must be a comment")
    parameters, columns = [], []
    for line in header[1:]:
        if line.rstrip() == "--":
            continue
        if found := _PARAMETER.fullmatch(line.rstrip()):
            parameters.append(Described(*found.groups()))
        elif found := _COLUMN.fullmatch(line.rstrip()):
            columns.append(Described(*found.groups()))
        else:
            raise QueryError(f"query {name}: its header line {line!r} is neither a parameter nor a column")
    title = header[0].removeprefix("--").strip()
    return Query(name, title, tuple(parameters), tuple(columns), "\n".join(body).strip())


def _folder() -> Path:
    """Return where the queries lie: inside an installed wheel, else beside the package in a working tree."""
    here = Path(__file__).resolve().parent
    packed = here / "_data" / "queries"
    return packed if packed.is_dir() else here.parent / "queries"
