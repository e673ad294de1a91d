"""What Grafana and its DuckDB plug-in do to a panel's SQL, and to the rows that come back.

Grafana's front end puts variables in, in the format that the text names; where a variable's choice is All and it has a
value for that, this value goes in as it is. The plug-in then expands the macros of Grafana's SQL library (sqlutil) and
gives columns of types that it does not know as text.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL = "$__all"
_VARIABLE = re.compile(r"\$\{(\w+)(?:\.([^:^}]+))?(?::([^}]+))?\}")
_MACRO = re.compile(r"\$__(\w+)(?:\((.*?)\))?")
_NUMBERS = {"BIGINT", "INTEGER", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT"}
_TIMES = {"TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "DATE"}


@dataclass(frozen=True, slots=True)
class Situation:
    """What the user sees when a panel asks: the time range and the interval in ms, the variables' choices."""

    from_ms: int
    to_ms: int
    interval_ms: int = 1000
    chosen: Mapping[str, str] = field(default_factory=dict)
    all_values: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> str:
        """Return a variable's or a built-in's value as text."""
        builtin = {"__from": self.from_ms, "__to": self.to_ms, "__interval_ms": self.interval_ms}
        return str(builtin[name]) if name in builtin else self.chosen[name]


def interpolated(text: str, situation: Situation) -> str:
    """Return the text as it leaves the browser; a KeyError means that no such variable exists."""

    def put_in(found: re.Match[str]) -> str:
        name, _path, how = found.groups()
        value = situation.value(name)
        if value == ALL:
            return situation.all_values[name]
        if how == "raw":
            return value
        if how == "sqlstring":
            return "'" + value.replace("'", "''").replace('"', '\\"') + "'"
        raise ValueError(f"{found[0]} leaves it to the plug-in's release whether the value is quoted")

    return _VARIABLE.sub(put_in, text)


def expanded(sql: str, situation: Situation) -> str:
    """Return SQL with the macros expanded as the plug-in does; an unknown one is left, as it is there."""
    start, end = (_rfc3339(ms) for ms in (situation.from_ms, situation.to_ms))

    def expand(found: re.Match[str]) -> str:
        name, argument = found[1], (found[2] or "").strip()
        if name == "timeFilter":
            return f"{argument} >= '{start}' AND {argument} <= '{end}'"
        return {"timeFrom": f"'{start}'", "timeTo": f"'{end}'"}.get(name, found[0])

    return _MACRO.sub(expand, sql)


def promql(board: Mapping[str, Any], expression: str, interval_s: int, range_s: int, **chosen: str) -> str:
    """Return PromQL as it reaches Prometheus; variables not chosen stand at All, a KeyError means that there is none.

    `interval_s` is Grafana's rate interval, `range_s` the length of the time range that the board shows.
    """
    values = {one["name"]: one["allValue"] for one in board["templating"]["list"] if one["type"] == "query"}
    # A choice is meant literally: Grafana escapes it for the regular expression, and that for the string around it.
    values |= {name: re.escape(value).replace("\\", "\\\\") for name, value in chosen.items()}
    values |= {"__rate_interval": f"{interval_s}s", "__range": f"{range_s}s"}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


def _rfc3339(at_ms: int) -> str:
    return dt.datetime.fromtimestamp(at_ms // 1000, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def asked(target: Mapping[str, Any], situation: Situation) -> str:
    """Return the SQL that reaches DuckDB for a panel's target."""
    return expanded(interpolated(target["rawSql"], situation), situation)


def frame(columns: list[str], types: list[str], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return rows as the fields of a Grafana data frame: number, time (unix ms), boolean or string."""
    fields = []
    for at, (name, sql_type) in enumerate(zip(columns, types, strict=True)):
        kind = kind_of(sql_type)
        fields.append({"name": name, "type": kind, "values": [_value(row[at], kind) for row in rows]})
    return {"fields": fields}


def kind_of(sql_type: str) -> str:
    """Return the kind of field that the plug-in makes of a column: what it does not know becomes text."""
    if sql_type in _NUMBERS or sql_type.startswith("DECIMAL"):
        return "number"
    if sql_type in _TIMES:
        return "time"
    return "boolean" if sql_type == "BOOLEAN" else "string"


def _value(value: Any, kind: str) -> Any:
    if value is None or kind in ("number", "boolean"):
        return value
    return round(value.timestamp() * 1000) if kind == "time" else str(value)


def situation_of(board: Mapping[str, Any], from_ms: int, to_ms: int, **chosen: str) -> Situation:
    """Return the situation in which a board is opened: defaults of its variables, but for those chosen."""
    choices: dict[str, str] = {}
    all_values: dict[str, str] = {}
    for variable in board["templating"]["list"]:
        choices[variable["name"]] = variable["current"].get("value", "")
        if variable.get("allValue") is not None:
            all_values[variable["name"]] = variable["allValue"]
    return Situation(from_ms, to_ms, 1000, {**choices, **chosen}, all_values)
