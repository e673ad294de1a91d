"""A row of a table of figures: what, measured, aim, reached or not.

A figure that has an aim is rounded to its disadvantage (up where less is better, an interval outwards): what is shown
never looks better than it was, and the judgement is that of the figure that is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOT_MEASURED = "not measured"
DIGITS = 3
_TENTH = Decimal("0.1")

Interval = tuple[float, float, float]
"""Mean, low and high of a relative difference."""


@dataclass(frozen=True)
class Aim:
    """What a figure should be: at most or at least a number, or a difference of which the interval lies within."""

    kind: str
    limit: float

    def text(self, unit: str) -> str:
        """Return the aim in words."""
        if self.kind == "within":
            return f"no effect, within {plain(self.limit * 100)} %"
        return f"at {self.kind} {plain(self.limit)}{unit}" if self.limit else f"0{unit}"

    def judged(self, value: float | Mapping[str, Interval]) -> str:
        """Return whether the aim is reached, in words; several intervals reach it only together."""
        if not isinstance(value, dict):
            reached = value <= self.limit if self.kind == "most" else value >= self.limit
            return "reached" if reached else "not reached"
        if all(-self.limit <= low and high <= self.limit for _, low, high in value.values()):
            return "reached"
        missed = [name for name, (_, low, high) in value.items() if low > self.limit or high < -self.limit]
        return f"not reached: {', '.join(missed)}" if missed else "open: intervals reach beyond it"


def at_most(limit: float) -> Aim:
    """Return the aim of a figure of which less is better."""
    return Aim("most", limit)


def at_least(limit: float) -> Aim:
    """Return the aim of a figure of which more is better."""
    return Aim("least", limit)


def within(limit: float) -> Aim:
    """Return the aim of a relative difference that should be none, to so much."""
    return Aim("within", limit)


@dataclass(frozen=True)
class Row:
    """One figure of a bench: how it is found in what the bench found, and how it is said."""

    what: str
    unit: str
    """As it follows the number, with its space."""
    part: Callable[[Any], Any]
    """The number, or relative differences by name; LookupError where it was not measured."""
    aim: Aim | None = None
    size: Callable[[Any], str] | None = None
    """Of what: follows the words."""
    more: Callable[[Any], str] | None = None
    """What else is said of it: follows the number."""
    caveat: Callable[[Any], str] | None = None
    """What the aim was set for, where this is something else: follows the judgement."""

    def cells(self, found: Any | None) -> tuple[str, str, str, str]:
        """Return what, measured, aim, and whether it is reached."""
        aim = self.aim.text(self.unit) if self.aim else ""
        try:
            value = None if found is None else self.part(found)
        except LookupError:
            value = None
        if found is None or value is None:
            return self.what, NOT_MEASURED, aim, ""
        what = self.what + (self.size(found) if self.size else "")
        more = self.more(found) if self.more else ""
        if isinstance(value, dict):
            value = {name: outwards(interval) for name, interval in value.items()}
            measured = ", ".join(f"{name} {in_words(interval)}" for name, interval in value.items())
        else:
            value = shortened(value, self.aim.kind if self.aim else "")
            measured = plain(value) + self.unit
        judged = self.aim.judged(value) if self.aim else ""
        caveat = self.caveat(found) if self.caveat and judged else ""
        return what, measured + more, aim, judged + caveat


def table(rows: list[tuple[str, ...]], *headings: str) -> str:
    """Return a table in Markdown."""
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (headings, *rows)]
    return "\n".join((lines[0], "|---" * len(headings) + "|", *lines[1:]))


def shortened(value: float, better: str = "") -> float:
    """Return a number to three digits: rounded up where an aim is "most", down where it is "least"."""
    rounding = {"most": ROUND_CEILING, "least": ROUND_FLOOR}.get(better, ROUND_HALF_EVEN)
    exact = _exact(value)
    if not exact:
        return 0
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - DIGITS + 1), rounding))


def outwards(interval: Interval) -> Interval:
    """Return an interval to a tenth of a percent, its ends rounded outwards."""
    mean, low, high = interval
    return _to_tenth(mean, ROUND_HALF_EVEN), _to_tenth(low, ROUND_FLOOR), _to_tenth(high, ROUND_CEILING)


def _to_tenth(share: float, rounding: str) -> float:
    return float((_exact(share) * 100).quantize(_TENTH, rounding) / 100)


def _exact(value: float) -> Decimal:
    """Return a number without the noise of binary fractions, which rounding up would make a digit of."""
    return Decimal(f"{value:.9g}")


def in_words(interval: Interval) -> str:
    """Return a relative difference with its 95 % interval in percent."""
    mean, low, high = interval
    return f"{mean * 100:+.1f} % ({low * 100:+.1f} to {high * 100:+.1f})"


def plain(value: float) -> str:
    """Return a number as people write it: thousands apart, no zeros that say nothing."""
    return f"{value:,.6f}".rstrip("0").rstrip(".")
