"""How everything looks: one colour and one glyph per class, units, and text that cannot hurt a terminal."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console

from kvtrace.palette import CLASS_COLOUR
from kvtrace.stages import Class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLAIN_WIDTH_COLUMNS = 100
NS_PER_MS = 1_000_000
_TIE = "\N{NO-BREAK SPACE}"
_BEFORE_APART = 4
"""So many letters are left of what two texts begin with, before the first in which they differ."""


@dataclass(frozen=True, slots=True)
class ClassStyle:
    """A class's colour (told apart by colour-blind eyes too), its glyph, and the glyph where only ASCII goes."""

    colour: str
    glyph: str
    ascii_glyph: str


CLASS_STYLE: Mapping[str, ClassStyle] = {
    Class.RUN.value: ClassStyle(CLASS_COLOUR[Class.RUN.value], "█", "#"),
    Class.QUEUE.value: ClassStyle(CLASS_COLOUR[Class.QUEUE.value], "▓", "+"),
    Class.COORDINATION.value: ClassStyle(CLASS_COLOUR[Class.COORDINATION.value], "▒", "-"),
    Class.TRANSFER.value: ClassStyle(CLASS_COLOUR[Class.TRANSFER.value], "═", "="),
    Class.UNATTRIBUTED.value: ClassStyle(CLASS_COLOUR[Class.UNATTRIBUTED.value], "?", "?"),
}


@dataclass(frozen=True, slots=True)
class Signs:
    """The other marks of a picture."""

    hidden: str
    slack: str
    bracket_open: str
    bracket_line: str
    bracket_close: str
    tight: str
    ellipsis: str
    axis: str
    tick: str


UNICODE_SIGNS = Signs("░", "·", "├", "─", "┤", "│", "…", "─", "┬")
ASCII_SIGNS = Signs("o", ".", "[", "-", "]", "|", "~", "-", "+")


def open_console() -> Console:
    """Return the console for stdout: a terminal's own width, a plain width where stdout is a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isascii() and columns.isdecimal() else 0
    width = asked or (None if sys.stdout.isatty() else PLAIN_WIDTH_COLUMNS)
    # rich would believe what is no width, too.
    rest = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return Console(width=width, _environ=rest, highlight=False, markup=False, emoji=False)


def speaks_unicode(console: Console) -> bool:
    """Return whether block and line glyphs can be written to the console."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def signs(console: Console) -> Signs:
    """Return the marks that the console can show."""
    return UNICODE_SIGNS if speaks_unicode(console) else ASCII_SIGNS


def glyph(console: Console, kind: str) -> str:
    """Return the one-cell glyph of a class that the console can show."""
    style = CLASS_STYLE.get(kind, CLASS_STYLE[Class.UNATTRIBUTED.value])
    return style.glyph if speaks_unicode(console) else style.ascii_glyph


def colour(kind: str) -> str:
    """Return the colour of a class; an unknown class looks unattributed."""
    return CLASS_STYLE.get(kind, CLASS_STYLE[Class.UNATTRIBUTED.value]).colour


def printable(text: object) -> str:
    """Return the text with control, formatting and other invisible characters escaped; None is empty."""
    if text is None:
        return ""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text))


def fitted(text: object, width_cells: int, console: Console) -> str:
    """Return the printable text, shortened in its middle to at most `width_cells` terminal cells."""
    whole = printable(text)
    # Nobody reads more of an id than fits on a few lines, and measuring 10 kB cell by cell is slow.
    if len(whole) > 4 * width_cells:
        whole = whole[: 2 * width_cells] + whole[-2 * width_cells :]
    elif cell_len(whole) <= width_cells:
        return whole
    head, tail = whole[: width_cells // 2], whole[-((width_cells - 1) // 2) :] if width_cells > 2 else ""
    while head and cell_len(head) + 1 + cell_len(tail) > width_cells:
        head, tail = (head[:-1], tail) if len(head) >= len(tail) else (head, tail[1:])
    return head + signs(console).ellipsis + tail


def fitted_apart(one: str, other: str, width_cells: int, console: Console) -> tuple[str, str]:
    """Return two texts as `fitted` does; where these would look alike, without most of what both begin with."""
    short = fitted(one, width_cells, console), fitted(other, width_cells, console)
    if short[0] != short[1] or one == other:
        return short
    shortest = min(len(one), len(other))
    alike = next((place for place in range(shortest) if one[place] != other[place]), shortest)
    rests = [signs(console).ellipsis + text[max(0, alike - _BEFORE_APART) :] for text in (one, other)]
    return fitted(rests[0], width_cells, console), fitted(rests[1], width_cells, console)


def milliseconds(duration_ns: float | None, scale_ns: float | None = None) -> str:
    """Return the duration in ms without the unit, with the digits that suit durations of about `scale_ns`."""
    if duration_ns is None:
        return "-"
    scale = abs(scale_ns if scale_ns is not None else duration_ns)
    digits = 1 if scale >= 10 * NS_PER_MS else 3
    least = 10**-digits
    if 0 < duration_ns < least * NS_PER_MS / 2:
        return f"<{least:.{digits}f}"
    return f"{duration_ns / NS_PER_MS:.{digits}f}"


def milliseconds_alike(durations_ns: Sequence[float | None]) -> list[str]:
    """Return the durations of one column in ms, all with the digits that suit the longest."""
    scale_ns = max((abs(one) for one in durations_ns if one is not None), default=0)
    return [milliseconds(one, scale_ns) for one in durations_ns]


def percent(part: float | None, whole: float | None) -> str:
    """Return the share as a whole percentage with its sign; a small one that is not nothing says so."""
    if part is None or not whole:
        return "-"
    share = 100 * part / whole
    if 0 < share < 0.5:
        return "<1 %"
    return f"{share:.0f} %"


def prose(text: str, console: Console) -> str:
    """Return sentences, made printable, broken into the console's lines, a number kept together with its unit."""
    bound = re.sub(r"(\d) (%|ms|s|[kMGT]?B)(?!\w)", f"\\1{_TIE}\\2", printable(text))
    return "\n".join(textwrap.wrap(bound, console.width, break_on_hyphens=False)).replace(_TIE, " ")


def size(number_bytes: int) -> str:
    """Return a number of bytes in the decimal unit that suits it."""
    value = float(number_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
