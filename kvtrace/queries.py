r"""Queries by name: one question a file in `queries/`, its header its documentation.

A header is a title line, then `-- $name TYPE sentence` per parameter and `-- name  TYPE  sentence` per column of
the answer. The database checks both: parameters are bound by name, and a test runs every query on an empty store.
A parameter whose type is `TYPE NOT NULL` has to be given, and not empty: "" is what stands in a store for no id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.errors import QueryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPES = r"[A-Z]+(?: WITH TIME ZONE)?(?:\[\])?"
_PARAMETER = re.compile(rf"-- \$(\w+)\s+({_TYPES})( NOT NULL)?\s+(\S.*)")
_COLUMN = re.compile(rf"-- (\w+)\s+({_TYPES})\s+(\S.*)")

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Time to first token": (
        *("ttft_shares", "shares_by_class", "causes", "hidden_work", "slowest_requests", "ttft_by_length"),
        *("ttft_by_concurrency", "ttft_by_pair", "ttft_over_time", "goodput", "goodput_over_time", "offered_over_time"),
    ),
    "The hand-off": (
        *("scenarios", "registrations", "handshakes", "transfers", "transfers_by_rank", "posting", "descriptors"),
        *("detection", "detection_spread", "blocks", "leases", "failures", "failures_over_time", "integrity"),
        "verdicts_over_time",
    ),
    "After the first token": ("tpot", "tpot_over_time", "itl_parts", "blamed"),
    "Engines": ("engines", "steps", "steps_over_time", "queues_over_time", "cores"),
    "One request": (
        *("request_summary", "request_path", "request_hidden", "request_blame", "request_spans", "request_profiles"),
    ),
    "The run and its recording": (
        *("findings", "run_facts", "run_span", "processes", "drops", "recorder", "recorder_messages"),
    ),
}
"""The names of all queries by what they are about, in the order of a reader's questions."""


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter or a column: name, SQL type, a sentence; whether a query cannot do without it."""

    name: str
    sql_type: str
    doc: str
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """One named query: its title, its parameters, the columns of its answer, its SQL."""

    name: str
    title: str
    parameters: tuple[Described, ...]
    columns: tuple[Described, ...]
    sql: str

    def bind(self, given: dict[str, str]) -> dict[str, object]:
        """Return a value for every parameter: the text given, read as its type, or None.

        Raises UsageError for what it does not have or cannot be, and where one that it needs is missing or empty.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                has = ", ".join(known) or "none"
                raise UsageError(f"query {self.name} has no parameter {name}; it has {has}")
        missing = [p for p in self.parameters if p.is_needed and not given.get(p.name)]
        if missing:
            name, doc = missing[0].name, missing[0].doc.rstrip(".")
            raise UsageError(f"query {self.name} needs its parameter {name}: add --param {name}=VALUE ({doc})")
        return {name: typed(p, given[name]) if name in given else None for name, p in known.items()}


def typed(parameter: Described, text: str) -> object:
    """Return `text` as a value of the parameter's type. Raises UsageError where it is none."""
    try:
        if parameter.sql_type in {"BIGINT", "INTEGER"}:
            return int(text)
        if parameter.sql_type == "DOUBLE":
            return float(text)
    except ValueError as error:
        raise UsageError(f"parameter {parameter.name} wants {parameter.sql_type}, not {text!r}") from error
    return text


def names() -> list[str]:
    """Return the names of all queries."""
    return sorted(path.stem for path in _folder().glob("*.sql"))


def load(name: str) -> Query:
    """Return the query of that name. Raises UsageError where there is none."""
    path = _folder() / f"{name}.sql"
    if name not in names():
        raise UsageError(f"there is no query {name}; `kvtrace sql --list` names them")
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
            parameters.append(Described(found[1], found[2], found[4], is_needed=found[3] is not None))
        elif found := _COLUMN.fullmatch(line.rstrip()):
            columns.append(Described(found[1], found[2], found[3]))
        else:
            raise QueryError(f"query {name}: its header line {line!r} is neither a parameter nor a column")
    title = header[0].removeprefix("--").strip()
    return Query(name, title, tuple(parameters), tuple(columns), "\n".join(body).strip())


def _folder() -> Path:
    """Return where the queries lie: inside an installed wheel, else beside the package in a working tree."""
    here = Path(__file__).resolve().parent
    packed = here / "_data" / "queries"
    return packed if packed.is_dir() else here.parent / "queries"
