"""One request drawn: its critical path by lane, the work hidden beside it, the bracket in which the wire ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kvtrace.report.style import CLASS_STYLE, colour, fitted, glyph, milliseconds, percent, signs
from kvtrace.stages import Class, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from kvtrace.report.selection import Explained

Row = dict[str, Any]

LANES: dict[str, str] = {
    Where.CLIENT.value: "client",
    Where.ROUTER.value: "router",
    Where.PREFILL.value: "P",
    Where.TRANSFER.value: "transfer",
    Where.DECODE.value: "D",
    Where.ENGINE.value: "engine",
    Where.PROCESS.value: "unknown",
}
_LANE_CELLS = 9
_CAUSE_CELLS = 22
_NUMBER_CELLS = 9
_PERCENT_CELLS = 6
_BAR_CELLS_MIN = 8
_BAR_CELLS_MAX = 120
_WIDE_COLUMNS = 72


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of the picture: what it is called, how long it took, and where its marks lie (start, end, glyph)."""

    lane: str
    label: str
    duration_ns: int
    marks: tuple[tuple[int, int, str], ...]
    style: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Time to cells: `cells` cells show the nanoseconds from `start_ns` to `start_ns + span_ns`."""

    start_ns: int
    span_ns: int
    cells: int

    def columns(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the first cell and the one past the last; at least one cell, inside the picture."""
        first = min(self._cell(start_ns), self.cells - 1)
        return first, min(max(self._cell(end_ns), first + 1), self.cells)

    def _cell(self, time_ns: int) -> int:
        return max(0, (2 * (time_ns - self.start_ns) * self.cells + self.span_ns) // (2 * self.span_ns))


def waterfall(explained: Explained, console: Console) -> list[Text]:
    """Return the picture's lines for this console's width; none if there is no time to draw."""
    request = explained.request
    times = [segment["end_ns"] for segment in explained.segments]
    span_ns = request["ttft_ns"] or (max(times) - request["start_ns"] if times else 0)
    if span_ns <= 0:
        return []
    wide = console.width >= _WIDE_COLUMNS
    left = _LANE_CELLS + _CAUSE_CELLS + _NUMBER_CELLS + (_PERCENT_CELLS if wide else 0) + 1
    cells = max(_BAR_CELLS_MIN, min(_BAR_CELLS_MAX, console.width - left - 1))
    scale = Scale(request["start_ns"], span_ns, cells)
    lines = [_axis(scale, left)]
    path = _lanes(path_bars(explained, console))
    lines += [_draw(bar, scale, wide, console) for bar in path]
    beside = _lanes(hidden_bars(explained, console))
    if beside:
        lines.append(Text("hidden beside the path", style="dim"))
        lines += [_draw(bar, scale, wide, console) for bar in beside]
    return [*lines, *_legend(explained, console)]


def path_bars(explained: Explained, console: Console) -> list[Bar]:
    """Return one bar per lane, cause and class of the critical path, and the bracket after the last transfer."""
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for segment in explained.segments:
        grouped.setdefault((segment["where"], segment["cause"], segment["class"]), []).append(segment)
    bars = []
    for (where, cause, kind), segments in grouped.items():
        marks = tuple((item["start_ns"], item["end_ns"], glyph(console, kind)) for item in segments)
        duration_ns = sum(end_ns - start_ns for start_ns, end_ns, _ in marks)
        crossing = any(item["crosses_hosts"] for item in segments)
        bars.append(Bar(where, f"{cause}*" if crossing else cause, duration_ns, marks, colour(kind)))
    bracket = _bracket(explained, console)
    return [*bars, bracket] if bracket else bars


def hidden_bars(explained: Explained, console: Console) -> list[Bar]:
    """Return one bar per lane and cause of hidden work, each piece followed by its slack."""
    marks_of = signs(console)
    grouped: dict[tuple[str, str], list[Row]] = {}
    for work in explained.hidden:
        grouped.setdefault((work["where"], work["cause"]), []).append(work)
    bars = []
    for (where, cause), pieces in grouped.items():
        marks: list[tuple[int, int, str]] = []
        for piece in pieces:
            end_ns = piece["start_ns"] + piece["duration_ns"]
            if piece["slack_ns"]:
                marks.append((end_ns, end_ns + piece["slack_ns"], marks_of.slack))
            marks.append((piece["start_ns"], end_ns, marks_of.hidden))
        slack_ns = [piece["slack_ns"] for piece in pieces if piece["slack_ns"] is not None]
        note = f"slack {milliseconds(min(slack_ns), explained.request['ttft_ns'])}" if slack_ns else ""
        bars.append(Bar(where, cause, sum(piece["duration_ns"] for piece in pieces), tuple(marks), "dim", note))
    return bars


def _bracket(explained: Explained, console: Console) -> Bar | None:
    """Return the stretch in which the last transfer may have ended, as its bounds say."""
    request = explained.request
    ends = [segment["end_ns"] for segment in explained.segments if segment["class"] == Class.TRANSFER.value]
    low_ns, high_ns, taken_ns = (request[name] for name in ("transfer_low_ns", "transfer_high_ns", "transfer_ns"))
    if not ends or low_ns is None or high_ns is None:
        return None
    earliest_ns, latest_ns = ends[-1] - (taken_ns - low_ns), ends[-1] + (high_ns - taken_ns)
    return Bar(
        Where.TRANSFER.value,
        "wire ended within",
        latest_ns - earliest_ns,
        ((earliest_ns, latest_ns, signs(console).bracket_line),),
        CLASS_STYLE[Class.TRANSFER.value].colour,
    )


def _lanes(bars: Iterable[Bar]) -> list[Bar]:
    """Return the bars lane by lane, in the order in which they begin; only the first of a lane names it."""
    order = {where: position for position, where in enumerate(LANES)}
    ordered = sorted(
        bars, key=lambda bar: (order.get(bar.lane, len(order)), _is_bracket(bar), min(mark[0] for mark in bar.marks))
    )
    named, previous = [], None
    for bar in ordered:
        lane = LANES.get(bar.lane, bar.lane)
        named.append(Bar("" if lane == previous else lane, bar.label, bar.duration_ns, bar.marks, bar.style, bar.note))
        previous = lane
    return named


def _is_bracket(bar: Bar) -> bool:
    return bar.label == "wire ended within"


def _draw(bar: Bar, scale: Scale, wide: bool, console: Console) -> Text:
    """Return one line: lane, cause, ms, share of the whole, and the marks."""
    hidden = bar.style == "dim"
    line = Text()
    line.append(f"{fitted(bar.lane, _LANE_CELLS - 1, console):<{_LANE_CELLS}}", style="dim" if hidden else "bold")
    line.append(f"{fitted(bar.label, _CAUSE_CELLS - 1, console):<{_CAUSE_CELLS}}", style="dim" if hidden else "")
    number = milliseconds(bar.duration_ns, scale.span_ns)
    line.append(f"{number:>{_NUMBER_CELLS}}", style="dim" if hidden else "")
    if wide:
        share = "" if hidden or _is_bracket(bar) else percent(bar.duration_ns, scale.span_ns)
        line.append(f"{share:>{_PERCENT_CELLS}}")
    line.append(" ").append("".join(_cells(bar, scale, console)).rstrip(), style=bar.style)
    return line


def _cells(bar: Bar, scale: Scale, console: Console) -> Sequence[str]:
    """Return the picture's cells for one bar; what begins and ends outside the picture leaves no mark."""
    cells = [" "] * scale.cells
    for start_ns, end_ns, mark in bar.marks:
        if end_ns < scale.start_ns or start_ns > scale.start_ns + scale.span_ns:
            continue
        first, last = scale.columns(start_ns, end_ns)
        cells[first:last] = mark * (last - first)
        if _is_bracket(bar):
            drawn = signs(console)
            cells[first] = drawn.bracket_open if last - first > 1 else drawn.tight
            if last - first > 1:
                cells[last - 1] = drawn.bracket_close
    if bar.note:
        _place(cells, bar.note)
    return cells


def _place(cells: list[str], note: str) -> None:
    """Write the note after the last mark, or before the first one, or not at all."""
    used = [position for position, cell in enumerate(cells) if cell != " "]
    first, last = (used[0], used[-1]) if used else (0, -2)
    if last + 2 + len(note) <= len(cells):
        cells[last + 2 : last + 2 + len(note)] = note
    elif first - 1 - len(note) >= 0:
        cells[first - 1 - len(note) : first - 1] = note


def _axis(scale: Scale, left: int) -> Text:
    """Return the line that names the start, the middle and the end of the picture in ms."""
    middle, end = milliseconds(scale.span_ns // 2, scale.span_ns), milliseconds(scale.span_ns)
    labels = f"{'0':<{scale.cells // 2}}{middle}" if scale.cells >= 24 else "0"
    labels = f"{labels:<{scale.cells - len(end)}}{end}"
    head = f"{'critical path':<{_LANE_CELLS + _CAUSE_CELLS}}{'ms':>{_NUMBER_CELLS}}"
    return Text(f"{head:<{left}}{labels}", style="bold")


def _legend(explained: Explained, console: Console) -> list[Text]:
    """Return what the glyphs of this picture mean."""
    marks_of = signs(console)
    used = {segment["class"] for segment in explained.segments}
    entries = [Text.assemble((glyph(console, kind), colour(kind)), f" {kind}") for kind in CLASS_STYLE if kind in used]
    if explained.hidden:
        entries += [Text(f"{marks_of.hidden} hidden", style="dim"), Text(f"{marks_of.slack} its slack", style="dim")]
    if any(segment["crosses_hosts"] for segment in explained.segments):
        entries.append(Text("* crosses hosts, rests on their wall clocks"))
    lines = [Text()]
    for entry in entries:
        if lines[-1] and lines[-1].cell_len + 2 + entry.cell_len > console.width:
            lines.append(Text())
        lines[-1] += (Text("  ") + entry) if lines[-1] else entry
    return lines
