"""The tables of README.md and docs/costs.md that the benches measured, printed by cog from docs/figures.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests import (
    bench_attribution,
    bench_checks,
    bench_emit,
    bench_ingest,
    bench_observers,
    bench_publication,
    bench_queries,
    bench_serving,
    bench_switched,
    figures,
)
from tests.figure_rows import NOT_MEASURED, Row, plain, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Entries = dict[str, Any]

ROWS: dict[str, dict[str, Row]] = {
    "emit": bench_emit.ROWS,
    "ingest": bench_ingest.ROWS,
    "attribution": bench_attribution.ROWS,
    "queries": bench_queries.ROWS,
    "observers": bench_observers.ROWS,
    "switched": bench_switched.ROWS,
    "switched_recorded": bench_switched.ROWS_RECORDED,
    "serving": bench_serving.ROWS,
    "serving_recorded": bench_serving.ROWS_RECORDED,
    "checks": bench_checks.ROWS,
    "publication": bench_publication.ROWS,
    "publication_large": bench_publication.ROWS_LARGE,
}
"""The rows of every entry that docs/figures.json can have."""

SHORT = (
    ("emit", "event"),
    ("emit", "off"),
    ("emit", "span"),
    ("emit", "lost"),
    ("ingest", "rate"),
    ("attribution", "rate"),
    ("attribution", "explain"),
    ("switched", "push"),
    ("switched", "pull"),
    ("publication", "age"),
    ("publication_large", "age"),
)
"""The README's rows."""
HEADINGS = ("what", "measured", "aim", "is it reached?")


def short(entries: Entries | None = None) -> str:
    """Return the README's table, under a line that says when and where its figures were measured."""
    entries = figures.load() if entries is None else entries
    rows = [ROWS[name][row].cells(_found(entries, name)) for name, row in SHORT]
    names = dict.fromkeys(name for name, _ in SHORT if name in entries)
    return f"{where(entries[name] for name in names)}\n\n{table(rows, *HEADINGS)}"


def of(*names: str, entries: Entries | None = None) -> str:
    """Return the table of all rows of these entries."""
    entries = figures.load() if entries is None else entries
    return table([row.cells(_found(entries, name)) for name in names for row in ROWS[name].values()], *HEADINGS)


def attribution(entries: Entries | None = None) -> str:
    """Return the table of the attribution in SQL by the size of the store."""
    found = _found(figures.load() if entries is None else entries, "attribution") or []
    rows = [
        (
            f"{one['requests']:,}", f"{one['events'] / 1e6:,.1f} million", f"{one['walk_s']:.1f} s",
            f"{one['per_s']:,}", plain(one["ratio"]), f"{one['peak_mib'] / 1024:.1f} GiB", f"{one['explain_s']:.2f} s",
        )
        for one in found
    ]  # fmt: skip
    headings = ("requests", "events", "takes", "requests/s", "times the pivot", "peak memory", "`explain`")
    return table(rows or [(NOT_MEASURED, *[""] * (len(headings) - 1))], *headings)


def queries(entries: Entries | None = None) -> str:
    """Return the table of what every named query takes, the slowest first."""
    found = (_found(figures.load() if entries is None else entries, "queries") or {}).get("queries", {})
    slowest_first = sorted(found.items(), key=lambda one: -max(one[1].values()))
    rows = [(f"`{name}`", f"{took['whole_ms']} ms", f"{took['part_ms']} ms") for name, took in slowest_first]
    return table(rows or [(NOT_MEASURED, "", "")], "query", "the whole store", "the third quarter of its time")


def runs(entries: Entries | None = None) -> str:
    """Return the table of how every entry was measured."""
    entries = figures.load() if entries is None else entries
    rows = []
    for name in ROWS:
        if entry := entries.get(name):
            machine = entry["machine"]
            load = " and ".join(f"{one:.1f}" for one in machine["load"])
            rows.append(
                (
                    f"`{entry['command']}`", entry["when"][:16].replace("T", " "), f"{entry['took_s']} s",
                    entry["commit"], f"{machine['cores']} of {machine['cpu']}, {machine['memory_gib']:.0f} GiB",
                    f"{_clock(machine['clock_ns'])}", load,
                )
            )  # fmt: skip
        else:
            rows.append((f"`{name}`", NOT_MEASURED, *[""] * 5))
    return table(rows, "command", "when (UTC)", "took", "commit", "cores", "clock reading", "load before and after")


def where(entries: Iterable[dict[str, Any]]) -> str:
    """Return in a sentence when, at which commit and on what these were measured."""
    measured = list(entries)
    if not measured:
        return "Nothing has been measured yet: `make figures`."
    days = sorted({entry["when"][:10] for entry in measured})
    commits = list(dict.fromkeys(entry["commit"] for entry in measured))
    machines = dict.fromkeys(f"{one['cores']} cores of {one['cpu']}" for one in _machines(measured))
    readings = [reading for one in _machines(measured) for reading in one["clock_ns"]]
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Measured on {when} at commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}, on "
        f"{' and '.join(machines)}, which read their clock in {_clock(readings)}:"
    )


def _machines(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (entry["machine"] for entry in entries)


def _clock(readings: list[float]) -> str:
    low, high = round(min(readings)), round(max(readings))
    return f"{low} ns" if low == high else f"{low} to {high} ns"


def _found(entries: Entries, name: str) -> Any:
    return entries[name]["found"] if name in entries else None
