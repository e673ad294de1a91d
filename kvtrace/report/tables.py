"""Tables: one request's shares and causes; a population's percentiles, causes, hidden work and worst requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from kvtrace.report import bracket
from kvtrace.report.population import AROUND
from kvtrace.report.sentences import cause_times
from kvtrace.report.style import colour, fitted, glyph, milliseconds, milliseconds_alike, percent
from kvtrace.stages import CAUSE_BY_NAME, Class
from kvtrace.wording import plural

if TYPE_CHECKING:
    from rich.console import Console

    from kvtrace.reconcile import Line
    from kvtrace.report.selection import Explained
    from kvtrace.totals import Total

Row = dict[str, Any]

CAUSES_SHOWN = 10
_WIDE_COLUMNS = 140
_MEDIUM_COLUMNS = 72
_BAR_CELLS_MAX = 60
_SHARE_LABEL_CELLS = 40
_ID_CELLS_MIN = 16
_ID_CELLS_MAX = 44
_GAP_CELLS = 3
# What the table of a request's causes needs beside "waited for": cause, ms, %, and class where there is room.
_CAUSE_COLUMNS_CELLS = 47
_CLASS_COLUMN_CELLS = 16
_WAITED_FOR_CELLS_MIN = 10
_WAITED_FOR_CELLS_MAX = 48
# What was waited for is wrapped; beyond about so many lines it is counted.
_WAITED_FOR_LINES = 3
_WAITED_FOR_WORDS_CELLS_MAX = 160

_WORST_SHARES = ("comp.", "coord.", "transf.", "unattr.")
# Label, class of the glyph, column of the request, key in a group's shares.
_SHARE_ROWS: tuple[tuple[str, str | None, str], ...] = (
    ("compute", None, "compute_ns"),
    ("  run", Class.RUN.value, "compute_run_ns"),
    ("  queue", Class.QUEUE.value, "compute_queue_ns"),
    ("coordination", Class.COORDINATION.value, "coordination_ns"),
    ("transfer", Class.TRANSFER.value, "transfer_ns"),
    ("unattributed", Class.UNATTRIBUTED.value, "unattributed_ns"),
)


def shares(request: Row, console: Console) -> list[Text]:
    """Return one line per class (ms, percentage, bar) and one with the bounds of transfer that its bracket leaves."""
    ttft_ns = request["ttft_ns"]
    cells = max(8, min(_BAR_CELLS_MAX, console.width - _SHARE_LABEL_CELLS))
    lines = []
    for label, kind, column in _SHARE_ROWS:
        time_ns = request[column]
        line = Text(f"{label:<14}{milliseconds(time_ns, ttft_ns):>10} ms{percent(time_ns, ttft_ns):>6}")
        bar = glyph(console, kind) * round(cells * time_ns / ttft_ns) if kind is not None and ttft_ns else ""
        if bar:
            line.append("  ").append(bar, style=colour(kind or ""))
        if kind == Class.TRANSFER.value and request["transfer_low_ns"] is not None:
            low, high = (milliseconds(request[name], ttft_ns) for name in ("transfer_low_ns", "transfer_high_ns"))
            lines += [line, Text(f"  {'between':<12}{low:>10} and {high} ms", style="dim")]
            continue
        lines.append(line)
    return lines


def request_causes(explained: Explained, console: Console) -> Table:
    """Return the causes of one request's path, longest first, as wide as the console has room for."""
    ttft_ns = explained.request["ttft_ns"]
    waited_for: dict[tuple[str, str], dict[str, None]] = {}
    for segment in explained.segments:
        if segment["waited_for"]:
            waited_for.setdefault((segment["cause"], segment["class"]), {})[segment["waited_for"]] = None
    medium, wide = console.width >= _MEDIUM_COLUMNS, console.width >= _WIDE_COLUMNS
    taken = _CAUSE_COLUMNS_CELLS + (_CLASS_COLUMN_CELLS if medium else 0)
    room = min(_WAITED_FOR_CELLS_MAX, max(_WAITED_FOR_CELLS_MIN, console.width - taken))
    table = _table("cause", ("ms", "right"), ("%", "right"), *(["class"] if medium else []))
    table.add_column("waited for", overflow="fold", min_width=_WAITED_FOR_CELLS_MIN, max_width=room)
    if wide:
        table.add_column("what that is", overflow="fold", ratio=1)
    for (cause, kind), time_ns in cause_times(explained.segments).items():
        row: list[Text | str] = [
            _cause(cause, kind, console),
            milliseconds(time_ns, ttft_ns),
            percent(time_ns, ttft_ns),
            *([kind] if medium else []),
            Text(_some(list(waited_for.get((cause, kind), {})), _WAITED_FOR_LINES * room, console)),
        ]
        if wide:
            row.append(CAUSE_BY_NAME[cause].doc if cause in CAUSE_BY_NAME else "")
        table.add_row(*row)
    return table


def _some(names: list[str], cells: int, console: Console) -> str:
    """Return the first names, each whole, that have room in so many cells, and how many others there are."""
    shown: list[str] = []
    for name in names:
        told = fitted(name, max(cells, _WAITED_FOR_WORDS_CELLS_MAX), console)
        if shown and cell_len(", ".join([*shown, told])) > cells:
            break
        shown.append(told)
    left = len(names) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left else "")


def percentiles(group: Row) -> Table:
    """Return TTFT and the shares around it, a column per percentile."""
    table = _table("", *((name, "right") for name, _, _ in AROUND))
    scale_ns = group["ttft_ns"]["p50"]
    table.add_row(
        "TTFT",
        *(f"{milliseconds(group['ttft_ns'][name], scale_ns)} ms" for name, _, _ in AROUND),
    )
    for label, kind, _ in _SHARE_ROWS:
        kinds = [kind] if kind is not None else [Class.RUN.value, Class.QUEUE.value]
        table.add_row(label, *(percent(sum(group["shares"][name][part] for part in kinds), 1) for name, _, _ in AROUND))
        if kind == Class.TRANSFER.value and any(bounds := [bracket.of_group(group, name) for name, _, _ in AROUND]):
            table.add_row("  between", *bounds, style="dim")
    table.add_row("requests", *(f"{group['shares'][name]['requests']:,}" for name, _, _ in AROUND), style="dim")
    return table


def population_causes(group: Row, console: Console) -> Table:
    """Return where the group's TTFT goes by cause: total, share of all TTFT, median of those affected."""
    medium = console.width >= _MEDIUM_COLUMNS
    table = _table(
        "cause",
        *(["class"] if medium else []),
        ("total ms", "right"),
        ("%", "right"),
        ("median ms", "right"),
        ("requests", "right"),
    )
    scale_ns = group["ttft_ns"]["p50"]
    shown = group["causes"][:CAUSES_SHOWN]
    for row, total in zip(shown, milliseconds_alike([row["total_ns"] for row in shown]), strict=True):
        table.add_row(
            _cause(row["cause"], row["class"], console),
            *([row["class"]] if medium else []),
            total,
            percent(row["share"], 1),
            milliseconds(row["median_ns"], scale_ns),
            f"{row['requests']:,}",
        )
    return table


def population_hidden(group: Row, console: Console) -> Table:
    """Return what went on beside the paths, with the least slack seen: how near it came to costing something."""
    medium = console.width >= _MEDIUM_COLUMNS
    titles = ("total ms", "median ms", "least slack ms") if medium else ("median ms", "least slack ms")
    table = _table("hidden work", *((title, "right") for title in (*titles, "requests")))
    scale_ns = group["ttft_ns"]["p50"]
    shown = group["hidden"][:CAUSES_SHOWN]
    for row, total in zip(shown, milliseconds_alike([row["total_ns"] for row in shown]), strict=True):
        table.add_row(
            _cause(row["cause"], row["class"], console),
            *([total] if medium else []),
            milliseconds(row["median_ns"], scale_ns),
            milliseconds(row["least_slack_ns"], scale_ns),
            f"{row['requests']:,}",
        )
    return table


def worst(group: Row, console: Console) -> Table:
    """Return the slowest requests by id, whole enough to be copied, with whatever else the width has room for."""
    rows = group["worst"]
    ids = [fitted(row["request_id"], min(_ID_CELLS_MAX, console.width - 12), console) for row in rows]
    longest = milliseconds_alike([row["longest_wait_ns"] for row in rows])
    waits = [
        "-" if row["longest_wait"] is None else f"{row['longest_wait']} {ms} ms"
        for row, ms in zip(rows, longest, strict=True)
    ]
    shares = [_worst_shares(row) for row in rows]
    widths = [max(map(cell_len, ids)), 9, max(map(len, ["longest wait", *waits]))]
    share_widths = [max(map(len, cells)) for cells in zip(_WORST_SHARES, *shares, strict=True)]
    with_waits, with_shares = _fits(widths, console), _fits([*widths, *share_widths], console)
    table = _table(
        "slowest",
        ("TTFT ms", "right"),
        *((title, "right") for title in (_WORST_SHARES if with_shares else ())),
        *(["longest wait"] if with_waits else []),
    )
    ttfts = milliseconds_alike([row["ttft_ns"] for row in rows])
    for name, ttft, cells, wait in zip(ids, ttfts, shares, waits, strict=True):
        table.add_row(Text(name), ttft, *(cells if with_shares else ()), *([wait] if with_waits else []))
    return table


def _worst_shares(row: Row) -> list[str]:
    """Return the shares of a request's classes; of transfer its bounds where these are wide."""
    columns = ("compute_ns", "coordination_ns", "transfer_ns", "unattributed_ns")
    compute, coordination, transfer, unattributed = (percent(row[column], row["ttft_ns"]) for column in columns)
    return [compute, coordination, bracket.of_row(row) or transfer, unattributed]


def blamed(rows: list[Row], console: Console) -> Table:
    """Return the requests whose transfers made other requests' steps longer, worst first."""
    table = _table("cost others most", ("ms", "right"), ("requests", "right"), ("descriptors", "right"))
    for row, extension in zip(rows, milliseconds_alike([row["extension_ns"] for row in rows]), strict=True):
        table.add_row(
            Text(fitted(row["request_id"], min(_ID_CELLS_MAX, console.width - 32), console)),
            extension,
            f"{row['victims']:,}",
            "-" if row["descriptors"] is None else f"{row['descriptors']:,}",
        )
    return table


def reconciled(lines: list[Line], console: Console) -> Table:
    """Return what other tools would report for one request, with what to know of each number."""
    table = _table("others would say", "of", ("ms", "right"))
    if console.width >= _MEDIUM_COLUMNS:
        table.add_column("which is", overflow="fold", ratio=1)
    for line, duration in zip(lines, milliseconds_alike([line.duration_ns for line in lines]), strict=True):
        table.add_row(line.tool, line.name, duration, *([line.says] if console.width >= _MEDIUM_COLUMNS else []))
    return table


def totals(found: list[Total]) -> Table:
    """Return vLLM's own totals beside the store's, with why they differ."""
    table = _table("total", "of engine", ("vLLM", "right"), ("store", "right"))
    table.add_column("", overflow="fold", ratio=1)
    for one in found:
        theirs = "-" if one.vllm is None else f"{one.vllm:,}"
        table.add_row(one.name, Text(one.engine), theirs, f"{one.kvtrace:,}", "the same" if one.agrees else one.why)
    return table


def attempts(rows: list[Row], client_request_id: str, console: Console) -> Table:
    """Return the requests that share one client id, so that each can be named by its own."""
    table = _table("request", ("attempt", "right"), "mode", "verdict", ("TTFT ms", "right"))
    table.title = Text(f"{plural(len(rows), 'request')} bear the client id {fitted(client_request_id, 40, console)}")
    table.title_justify = "left"
    for row, ttft in zip(rows, milliseconds_alike([row["ttft_ns"] for row in rows]), strict=True):
        table.add_row(
            Text(fitted(row["request_id"], max(_ID_CELLS_MIN, console.width - 44), console)),
            str(row["attempt"]),
            row["mode"],
            row["verdict"],
            ttft,
        )
    return table


def _fits(widths: list[int], console: Console) -> bool:
    return sum(widths) + _GAP_CELLS * (len(widths) - 1) <= console.width


def _cause(cause: str, kind: str, console: Console) -> Text:
    return Text.assemble((glyph(console, kind), colour(kind)), f" {fitted(cause, 24, console)}")


def _table(*columns: str | tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        title, justify = (column, "left") if isinstance(column, str) else column
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table
