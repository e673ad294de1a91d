"""Numbers as people write them, wherever a sentence names one; tables line theirs up themselves."""

from __future__ import annotations

_DIGITS = 3
_DECIMALS_MOST = 6


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return the count with its noun: 1 request, 2 requests; `nouns` is what more than one is where no s makes it."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def figure(value: float) -> str:
    """Return a number with three significant digits, and with all of those before the point: 0.412, 8.41, 2,375."""
    value = round(value, _DECIMALS_MOST) or 0  # of no sign where nothing of it is shown
    decimals = 0
    # One more decimal stays where it does not make the number so large that it needs none.
    while value and decimals < _DECIMALS_MOST and abs(round(value, decimals + 1)) < 10 ** (_DIGITS - 1 - decimals):
        decimals += 1
    return f"{value:,.{decimals}f}"


def ms(duration_ns: float) -> str:
    """Return a duration in milliseconds, with its unit."""
    return f"{figure(duration_ns / 1e6)} ms"


def seconds(duration_ns: float) -> str:
    """Return a duration in seconds, with its unit."""
    return f"{figure(duration_ns / 1e9)} s"
