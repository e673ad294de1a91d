"""A board: variables, rows of panels and links, laid out and written as Grafana's classic JSON (10.4 and later)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtrace.dashboards.panels import Json, Panel
from kvtrace.dashboards.sources import ALL, DUCKDB, PROMETHEUS, SOURCE_VARIABLE, duckdb_source, prometheus_source

TAG = "kvtrace"
# Grafana 10.4's; later ones bring it along to theirs as they load it.
SCHEMA_VERSION = 39
GRID_COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: its address, title, what it is for, its variables and its rows (title -> panels)."""

    uid: str
    title: str
    doc: str
    variables: tuple[Json, ...]
    rows: Mapping[str, Sequence[Panel]]
    refresh: str = ""

    @property
    def panels(self) -> list[Panel]:
        """Return the panels in their order."""
        return [panel for panels in self.rows.values() for panel in panels]

    def to_json(self) -> Json:
        """Return the dashboard as Grafana reads it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.doc,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "",
            "time": {"from": "now-1h", "to": "now"},
            "refresh": self.refresh,
            "links": [_link_to_others()],
            "templating": {"list": list(self.variables)},
            "annotations": {"list": []},
            "panels": _laid_out(self.rows),
        }

    def text(self) -> str:
        """Return the dashboard's file."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"


def _link_to_others() -> Json:
    return {
        "type": "dashboards",
        "tags": [TAG],
        "title": "kvtrace",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _laid_out(rows: Mapping[str, Sequence[Panel]]) -> list[Json]:
    """Return rows and panels with ids and places: from left to right, a new line where one is full."""
    laid: list[Json] = []
    y = 0
    for title, panels in rows.items():
        laid.append(
            {
                "id": len(laid) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1},
            }
        )
        y += 1
        x = line_height = 0
        for panel in panels:
            if x + panel.width > GRID_COLUMNS:
                y, x, line_height = y + line_height, 0, 0
            laid.append(panel.to_json(len(laid) + 1, x, y))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return laid


# Variables ----------------------------------------------------------------------------------------------


def source(label: str, name: str, kind: str, doc: str) -> Json:
    """Return a variable that chooses among the data sources of one kind."""
    return {
        "type": "datasource",
        "name": name,
        "label": label,
        "description": doc,
        "query": kind,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "refresh": 1,
        "options": [],
        "current": {},
        "hide": 0,
    }


def run_source() -> Json:
    """Return the variable that chooses the store: one DuckDB data source for each run."""
    return source("Run", SOURCE_VARIABLE, DUCKDB, "The store: one DuckDB data source for each.")


def prometheus_instance() -> Json:
    """Return the variable that chooses the Prometheus."""
    return source("Prometheus", "prometheus", PROMETHEUS, "The Prometheus that scrapes the recorder.")


def chosen(name: str, label: str, doc: str, sql: str, *, with_all: bool = True) -> Json:
    """Return a variable whose values a SELECT lists; `All` selects nothing."""
    return _query(name, label, doc, duckdb_source(), sql, sql, with_all=with_all, all_value=ALL)


def label_of(name: str, label: str, doc: str, metric: str, of: str = "") -> Json:
    """Return a variable of the values that a metric's Prometheus label `of`, else `name`, has; `All` matches any."""
    text = f"label_values({metric}, {of or name})"
    query = {"query": text, "refId": "A"}
    return _query(name, label, doc, prometheus_source(), query, text, with_all=True, all_value=".*")


def _query(
    name: str, label: str, doc: str, of: Json, query: Any, definition: str, *, with_all: bool, all_value: str
) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "description": doc,
        "datasource": of,
        "query": query,
        "definition": definition,
        "regex": "",
        "refresh": 2,
        "sort": 0,
        "multi": False,
        "includeAll": with_all,
        "allValue": all_value if with_all else None,
        "options": [],
        "current": {"text": "All", "value": "$__all", "selected": True} if with_all else {},
        "hide": 0,
    }


def typed(name: str, label: str, doc: str, value: str = "") -> Json:
    """Return a variable that is typed in."""
    return {
        "type": "textbox",
        "name": name,
        "label": label,
        "description": doc,
        "query": value,
        "options": [{"text": value, "value": value, "selected": True}],
        "current": {"text": value, "value": value, "selected": True},
        "hide": 0,
    }
