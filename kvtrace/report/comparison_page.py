"""The page of two recordings: the sentence on top, what else differs, then a section for each pair of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from kvtrace.report import contrasts
from kvtrace.report.comparison import ASKED, FEW, SIDES, WAITED
from kvtrace.report.sentences import SCOPES
from kvtrace.report.style import NS_PER_MS, colour, fitted, fitted_apart, glyph, printable, prose
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    Writer = Callable[[float], str]
    Line = tuple[str | Text, dict[str, Any], Writer]

Row = dict[str, Any]

CAUSES_SHOWN = 10
_GAP_CELLS = 3
_LABEL_CELLS = 24
_NAME_CELLS = 36
_VALUE_CELLS = 60
_TOLD_APART = {True: "yes", False: "no", None: "-"}


def print_comparison(document: Row, paths: Sequence[str], console: Console) -> None:
    """Print what differs between two recordings; `paths` are the first's and the second's."""
    names = fitted_apart(*contrasts.called(paths), _NAME_CELLS, console)
    document = {**document, "differs": [_shortened(one, console) for one in document["differs"]]}
    _say(contrasts.sentence(document, names), console, "bold")
    for told in contrasts.cautions(document, names):
        _say(told, console)
    rates = [(contrasts.WHAT[name], line, _plain(2)) for name, line in document["load"]["rates"].items()]
    if rates:
        console.print()
        console.print(_table("load", rates, console))
    for number, group in enumerate(document["groups"]):
        console.print()
        _print_group(group, names, console, repeats=number > 0)
    if document["groups"]:
        console.print()
        _say(f"In the tables, run is {names[0]}, against is {names[1]}, and a difference is run less against.", console)
        if _has_interval(document):
            _say(contrasts.INTERVALS, console, "dim")


def _has_interval(document: Row) -> bool:
    """Return whether any line of the tables has one."""
    lines = list(document["load"]["rates"].values())
    for group in document["groups"]:
        lines += [*group["classes"], *group["causes"]]
        lines += [line for name in (*WAITED, *ASKED) for line in group.get(name, {}).values()]
    return any(line["low"] is not None for line in lines)


def _shortened(setting: Row, console: Console) -> Row:
    """Return what differs between the recordings as it fits into a sentence; some flags are pages of JSON."""
    run, against = (printable(setting[side]) for side in SIDES)
    values = fitted_apart(run, against, _VALUE_CELLS, console)
    return {"what": fitted(setting["what"], _VALUE_CELLS, console), **dict(zip(SIDES, values, strict=True))}


def _print_group(group: Row, names: contrasts.Names, console: Console, *, repeats: bool) -> None:
    scope = group["run"]["scope"]
    modes = dict.fromkeys(group[side]["mode"] for side in SIDES)
    told = f"{' against '.join(modes)}, scope {scope} ({SCOPES.get(scope, 'seen from an unnamed place')}): "
    _say(told + f"{_verdicts(group['run'])} against {_verdicts(group['against'])}", console, "bold")
    if repeats:
        for said in (contrasts.of_group(group, names), *contrasts.group_cautions(group, names)):
            _say(said, console)
    missing = "-" if group["no_intervals"] else "too few"
    figures = {name: list(group[name].values()) for name in WAITED if name in group}
    places = max(_digits(lines, lines) for lines in figures.values())
    waited = [
        (f"{contrasts.WHAT[name]} {which}", line, _milliseconds(places))
        for name in figures
        for which, line in group[name].items()
    ]
    mean = group["ttft_ns"]["mean"]
    write = _milliseconds(_digits([*group["classes"], mean], [mean]))
    kinds = [(_marked(one["class"], one["class"], console), one, write) for one in group["classes"]]
    named = contrasts.named_causes(group)
    shown = [one for place, one in enumerate(group["causes"]) if place < CAUSES_SHOWN or one in named]
    rest = [one for one in group["causes"] if one not in shown]
    by_cause = _milliseconds(_digits([*shown, mean], [mean]))
    causes: list[Line] = [(_marked(one["cause"], one["class"], console), one, by_cause) for one in shown]
    if rest:
        causes.append((plural(len(rest), "other cause"), _summed(rest), by_cause))
    blocks = [
        _table("ms", waited, console, missing),
        _table("mean ms by class", [*kinds, ("TTFT, their sum", mean, write)], console),
        *([_table("mean ms by cause", causes, console)] if causes else []),
        *_asked(group, console),
    ]
    for block in blocks:
        console.print()
        console.print(block)


def _asked(group: Row, console: Console) -> Iterator[Table | Text]:
    """Yield how long prompts and answers were; a line where they were alike to the token."""
    lines = [
        (f"{contrasts.WHAT[name]} {which}", line, _plain(1))
        for name in ASKED
        if name in group
        for which, line in group[name].items()
    ]
    if any(line["difference"] for _, line, _ in lines):
        yield _table("", lines, console, "-" if group["no_intervals"] == FEW else "too few")
    elif lines:
        told = (f"{contrasts.WHAT[name]} {group[name]['mean']['run']:,.1f}" for name in ASKED if name in group)
        yield Text(prose(f"As long on either side, in the mean and in every percentile: {', '.join(told)}.", console))


def _verdicts(side: Row) -> str:
    return ", ".join(f"{count:,} {verdict}" for verdict, count in side["verdicts"].items())


def _summed(lines: Sequence[Row]) -> Row:
    """Return the line of all these together, of which no interval is told."""
    summed = {name: sum(line[name] for line in lines) for name in ("run", "against", "difference")}
    return {**summed, "low": None, "high": None, "told_apart": None}


def _digits(lines: Sequence[Row], scale: Sequence[Row]) -> int:
    """Return how many decimals of ms a column of these lines needs: those that suit the times of `scale`, or more."""
    scale_ns = max(max(line["run"], line["against"]) for line in scale)
    return max(contrasts.digits(line, scale_ns) for line in lines)


def _milliseconds(digits: int) -> Writer:
    return lambda value_ns: f"{value_ns / NS_PER_MS:.{digits}f}"


def _plain(digits: int) -> Writer:
    return lambda value: f"{value:,.{digits}f}"


def _table(title: str, lines: Sequence[Line], console: Console, missing: str = "-") -> Table:
    """Return a table of figures with their differences; without the two values where the width has no room for them.

    `missing` is what stands in the place of an interval.
    """
    titles = ["run", "against", "difference", "interval", "told apart"]
    cells = [_cells(line, write, missing) for _, line, write in lines]
    labels = [label if isinstance(label, Text) else Text(label) for label, _, _ in lines]
    first = max(cell_len(title), *(label.cell_len for label in labels))
    widths = [max(cell_len(row[place]) for row in [titles, *cells]) for place in range(len(titles))]
    if first + sum(widths) + _GAP_CELLS * len(widths) > console.width:
        titles[-1], widths[-1] = "apart", len("apart")
    if first + sum(widths) + _GAP_CELLS * len(widths) > console.width:
        titles, cells = titles[2:], [row[2:] for row in cells]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    for name in titles:
        table.add_column(name, justify="right", no_wrap=True)
    for label, row, (_, line, _) in zip(labels, cells, lines, strict=True):
        table.add_row(label, *row, style="" if line["told_apart"] else "dim")
    return table


def _cells(line: Row, write: Writer, missing: str) -> list[str]:
    interval = missing
    if line["low"] is not None:
        interval = f"{_signed(line['low'], write)} to {_signed(line['high'], write)}"
    values = [write(line[side]) for side in SIDES]
    return [*values, _signed(line["difference"], write), interval, _TOLD_APART[line["told_apart"]]]


def _signed(value: float, write: Writer) -> str:
    """Return the value with its sign, where anything of it is left to be seen."""
    written = write(abs(value))
    sign = "+" if value > 0 else "-"
    return f"{sign}{written}" if any(digit in "123456789" for digit in written) else written


def _marked(name: str, kind: str, console: Console) -> Text:
    return Text.assemble((glyph(console, kind), colour(kind)), f" {fitted(name, _LABEL_CELLS, console)}")


def _say(text: str, console: Console, style: str = "") -> None:
    console.print(Text(prose(text, console), style=style))
