"""Panels as values, and how each becomes Grafana's classic JSON: units, colours, columns, links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtrace.dashboards.sources import (
    FORMAT_TRACE,
    duckdb_source,
    duckdb_target,
    panel_sql,
    prometheus_source,
    prometheus_target,
)
from kvtrace.palette import CLASS_COLOUR, GREY, VERMILION

Json = dict[str, Any]
BARS_MOST = 60

# Columns of queries that hold a class's time, and the class.
CLASS_COLUMNS: Mapping[str, str] = {
    "compute_run": "compute.run",
    "compute_queue": "compute.queue",
    "coordination": "coordination",
    "transfer": "transfer",
    "unattributed": "unattributed",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column or series of a panel: its name in the data, what it is called, its unit, how it is drawn."""

    name: str
    label: str = ""
    unit: str = ""
    colour: str = ""
    width: int = 0
    bar: bool = False
    link: str = ""
    mappings: tuple[Json, ...] = ()
    axis: str = ""
    line: bool = False
    hidden: bool = False
    bad_from: int = 0
    wraps: bool = False

    def override(self) -> Json | None:
        """Return the field override that draws the column so, or None if there is nothing to override."""
        given: list[tuple[str, Any, bool]] = [
            ("displayName", self.label, bool(self.label)),
            ("unit", self.unit, bool(self.unit)),
            ("color", {"mode": "fixed", "fixedColor": self.colour}, bool(self.colour)),
            ("color", {"mode": "thresholds"}, bool(self.bad_from)),
            ("thresholds", bad_from(self.bad_from), bool(self.bad_from)),
            ("custom.width", self.width, bool(self.width)),
            ("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}, self.bar),
            ("min", 0, self.bar),
            ("max", 1, self.bar and self.unit == "percentunit"),
            ("mappings", list(self.mappings), bool(self.mappings)),
            ("custom.cellOptions", {"type": "color-text"}, bool(self.mappings)),
            ("links", [{"title": "Open", "url": self.link, "targetBlank": False}], bool(self.link)),
            # Grafana 10 to 12 read the one, later ones the other.
            ("custom.hidden", True, self.hidden),
            ("custom.hideFrom", {"legend": True, "tooltip": True, "viz": True}, self.hidden),
            ("custom.cellOptions", {"type": "auto", "wrapText": True}, self.wraps),
            ("custom.wrapText", True, self.wraps),
            ("custom.axisPlacement", self.axis, bool(self.axis)),
            ("custom.stacking", {"mode": "none", "group": "A"}, self.line),
            ("custom.drawStyle", "line", self.line),
            ("custom.fillOpacity", 0, self.line),
            ("custom.lineWidth", 2, self.line),
        ]
        properties = [{"id": identity, "value": value} for identity, value, is_given in given if is_given]
        return {"matcher": {"id": "byName", "options": self.name}, "properties": properties} if properties else None


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its title, what to use it for (a phrase after "Use it to"), its size, and the rest of its JSON."""

    title: str
    use: str
    kind: str
    width: int
    height: int
    body: Json = field(default_factory=dict)
    note: str = ""

    def to_json(self, identity: int, x: int, y: int) -> Json:
        """Return the panel as Grafana reads it, at its place."""
        return {
            "id": identity,
            "type": self.kind,
            "title": self.title,
            "description": f"Use it to {self.use}." + (f" {self.note}" if self.note else ""),
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            **self.body,
        }


def bad_from(value: float) -> Json:
    """Return thresholds that draw what reaches the value as a failure."""
    return {"mode": "absolute", "steps": [{"color": GREY, "value": None}, {"color": VERMILION, "value": value}]}


def class_columns(suffix: str = "_ms", unit: str = "ms", *, bar: bool = False) -> list[Column]:
    """Return a column for each class in its colour; `suffix` ends the names of such columns in the query."""
    return [
        Column(f"{stem}{suffix}", label, unit, CLASS_COLOUR[label], bar=bar) for stem, label in CLASS_COLUMNS.items()
    ]


def class_mappings() -> tuple[Json, ...]:
    """Return the value mappings that write a class's name in its colour."""
    options = {name: {"color": colour, "index": index} for index, (name, colour) in enumerate(CLASS_COLOUR.items())}
    return ({"type": "value", "options": options},)


def time_series(
    title: str,
    use: str,
    query: str,
    columns: Sequence[Column],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    note: str = "",
    given: Mapping[str, str] | None = None,
) -> Panel:
    """Return a panel of series over time, one per column of a query whose time is `ts`."""
    sql = panel_sql(query, ["ts", *(column.name for column in columns)], given)
    body = _series_body(columns, unit, stacked=stacked)
    return Panel(title, use, "timeseries", width, height, _asking(sql, body), note)


def prometheus_series(
    title: str,
    use: str,
    expressions: Mapping[str, str],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    colours: Mapping[str, str] | None = None,
    note: str = "",
) -> Panel:
    """Return a panel of series over time: legend -> PromQL; a legend may hold labels, as in `{{engine}}`."""
    columns = [Column(name, colour=colour) for name, colour in (colours or {}).items()]
    body = _series_body(columns, unit, stacked=stacked)
    targets = [prometheus_target(at, text, legend) for at, (legend, text) in enumerate(expressions.items())]
    return Panel(
        title, use, "timeseries", width, height, {"datasource": prometheus_source(), "targets": targets, **body}, note
    )


def _series_body(columns: Sequence[Column], unit: str, *, stacked: bool) -> Json:
    custom = {
        "drawStyle": "bars" if stacked else "line",
        "lineWidth": 0 if stacked else 1,
        "fillOpacity": 80 if stacked else 10,
        "barAlignment": 1,
        "showPoints": "never" if stacked else "auto",
        "pointSize": 5,
        "spanNulls": False,
        "lineInterpolation": "linear",
        "axisPlacement": "auto",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "linear"},
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "thresholdsStyle": {"mode": "off"},
    }
    defaults = {"unit": unit, "min": 0, "color": {"mode": "palette-classic"}, "custom": custom}
    legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "none"}}
    body: Json = {"fieldConfig": {"defaults": defaults, "overrides": _overrides(columns)}, "options": options}
    # The least length of a row's time; bars want to be few enough to be seen.
    return body | {"interval": "1s"} | ({"maxDataPoints": BARS_MOST} if stacked else {})


def table(
    title: str,
    use: str,
    query: str,
    columns: Sequence[Column],
    *,
    width: int = 24,
    height: int = 8,
    note: str = "",
    given: Mapping[str, str] | None = None,
) -> Panel:
    """Return a table of columns of a query, in the query's order."""
    sql = panel_sql(query, [column.name for column in columns], given)
    defaults = {
        "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True, "inspect": False},
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": [{"color": "text", "value": None}]},
        # A bar is measured by its own column's greatest value, not by that of the whole table.
        "fieldMinMax": True,
    }
    options = {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}}
    body = {"fieldConfig": {"defaults": defaults, "overrides": _overrides(columns)}, "options": options}
    return Panel(title, use, "table", width, height, _asking(sql, body), note)


def figures(
    title: str,
    use: str,
    query: str,
    columns: Sequence[Column],
    *,
    kind: str = "stat",
    width: int = 12,
    height: int = 4,
    note: str = "",
    given: Mapping[str, str] | None = None,
) -> Panel:
    """Return a row of figures (kind stat) or of bars (kind bargauge), one per column of the query's last row."""
    sql = panel_sql(query, [column.name for column in columns], given)
    return Panel(title, use, kind, width, height, _asking(sql, _figures_body(columns, kind)), note)


def prometheus_figures(
    title: str,
    use: str,
    expressions: Mapping[str, str],
    *,
    unit: str,
    width: int = 6,
    height: int = 4,
    colours: Mapping[str, str] | None = None,
    bad: float | None = None,
    note: str = "",
) -> Panel:
    """Return figures for now: legend -> PromQL; from `bad` on they are drawn as failures."""
    columns = [Column(name, colour=colour) for name, colour in (colours or {}).items()]
    body = _figures_body(columns, "stat")
    body["fieldConfig"]["defaults"]["unit"] = unit
    if bad is not None:
        body["fieldConfig"]["defaults"] |= {"color": {"mode": "thresholds"}, "thresholds": bad_from(bad)}
    targets = [
        prometheus_target(at, text, legend, instant=True) for at, (legend, text) in enumerate(expressions.items())
    ]
    body |= {"datasource": prometheus_source(), "targets": targets}
    return Panel(title, use, "stat", width, height, body, note)


def _figures_body(columns: Sequence[Column], kind: str) -> Json:
    defaults = {
        "color": {"mode": "fixed", "fixedColor": GREY},
        "thresholds": {"mode": "absolute", "steps": [{"color": GREY, "value": None}]},
    }
    options: Json = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal" if kind == "bargauge" else "auto",
        "text": {},
    }
    if kind == "bargauge":
        defaults |= {"min": 0, "max": 1}
        options |= {"displayMode": "basic", "showUnfilled": True, "valueMode": "color", "namePlacement": "auto"}
    else:
        options |= {"colorMode": "value", "graphMode": "none", "justifyMode": "auto", "textMode": "auto"}
    return {"fieldConfig": {"defaults": defaults, "overrides": _overrides(columns)}, "options": options}


def trace(title: str, use: str, query: str, *, height: int = 16, note: str = "") -> Panel:
    """Return Grafana's trace panel over a query that gives spans."""
    body = {"datasource": duckdb_source(), "targets": [duckdb_target(panel_sql(query), FORMAT_TRACE)], "options": {}}
    return Panel(title, use, "traces", 24, height, body, note)


def _asking(sql: str, body: Json) -> Json:
    return {"datasource": duckdb_source(), "targets": [duckdb_target(sql)], **body}


def _overrides(columns: Sequence[Column]) -> list[Json]:
    return [override for column in columns if (override := column.override())]
