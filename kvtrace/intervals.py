"""How well requests tell two recordings apart: estimates with intervals, and their difference with one.

Requests that are served one after the other are no independent draws: a queue that one finds the next one finds too.
Taken as independent they would tell two recordings of the same queue apart more often than not, so here a recording is
cut into blocks of consecutive requests, and what an estimate scatters by follows from how the blocks differ. Where
neighbouring blocks are alike, the interval is widened as for a first-order autoregression. Pure and without chance: the
same requests give the same interval, and swapping the two recordings negates the difference and its interval.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 20
"""So many blocks a recording is cut into: enough to know how they scatter, few enough for each to be long."""
CONFIDENCE = 0.95
WANDERING = 0.5
"""Neighbouring blocks that correlate more than this leave so few that are independent that no interval holds."""
_CORRELATION_MOST = 0.9
_ANGLES = 4_000


@dataclass(frozen=True, slots=True)
class Spread:
    """A ratio of sums over blocks: its value, its standard error, the degrees of freedom that this error has.

    `correlation` is that of neighbouring blocks, 0 where nothing scatters.
    """

    value: float
    error: float
    freedom: float
    correlation: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; `low` and `high` are None where too few requests bound it."""

    value: float
    low: float | None = None
    high: float | None = None


def spread(sums: Sequence[float], counts: Sequence[float]) -> Spread:
    """Return what blocks of these sums over these counts say of the ratio of the two; both in the blocks' order.

    Raises ValueError for fewer than two blocks, or where all counts are 0.
    """
    blocks, whole = len(sums), sum(counts)
    if blocks < 2 or not whole:
        raise ValueError(f"{blocks} blocks that count {whole} have no spread")
    value = sum(sums) / whole
    off = [one - value * count for one, count in zip(sums, counts, strict=True)]
    squares = sum(one * one for one in off)
    if not squares:
        return Spread(value, 0.0, blocks - 1, 0.0)
    correlation = sum(one * following for one, following in itertools.pairwise(off)) / squares
    bounded = min(max(correlation, 0.0), _CORRELATION_MOST)
    widening = (1 + bounded) / (1 - bounded)
    error = math.sqrt(widening * squares * blocks / (blocks - 1)) / whole
    return Spread(value, error, max(1.0, (blocks - 1) / widening), correlation)


def estimate(seen: Spread, lines: int = 1) -> Estimate:
    """Return the value with its interval, such that `lines` intervals hold together with `CONFIDENCE`."""
    half = seen.error and seen.error * _deviations(lines, seen.freedom)
    return Estimate(seen.value, seen.value - half, seen.value + half)


def ranks(below: Spread, quantile: float, requests: int, lines: int = 1) -> tuple[float, float] | None:
    """Return between which quantiles of the sample that quantile of what it was drawn from lies; None if unbounded.

    `below` is the share of requests up to the sample's quantile. Its error is taken for no less than that of as many
    independent requests, since blocks with few requests beyond a high percentile hardly differ.
    """
    error = max(below.error, math.sqrt(quantile * (1 - quantile) / requests))
    half = error * _deviations(lines, below.freedom)
    low, high = quantile - half, quantile + half
    return None if low <= 0 or high >= 1 else (low, high)


def difference(run: Estimate, against: Estimate) -> Estimate:
    """Return the first less the second, with the interval that follows from theirs.

    The distances from the value to the ends add up as squares, each end's by itself, since a percentile's interval is
    longer on one side (Zou and Donner, 2008).
    """
    value = run.value - against.value
    if run.low is None or run.high is None or against.low is None or against.high is None:
        return Estimate(value)
    below = math.hypot(run.value - run.low, against.high - against.value)
    above = math.hypot(run.high - run.value, against.value - against.low)
    return Estimate(value, value - below, value + above)


def apportioned(totals: Sequence[int], count: int) -> list[int]:
    """Return every total by `count` in whole units, rounded so that they add up to their sum by `count`, rounded.

    What rounding leaves over goes to those that it is nearest to.
    """
    whole = _rounded(sum(totals), count)
    parts = [_rounded(total, count) for total in totals]
    rest = whole - sum(parts)
    sign = 1 if rest > 0 else -1
    lacking = [(total - part * count) * sign for total, part in zip(totals, parts, strict=True)]
    for place in sorted(range(len(parts)), key=lambda place: -lacking[place])[: abs(rest)]:
        parts[place] += sign
    return parts


def _rounded(total: int, count: int) -> int:
    return (2 * total + count) // (2 * count)


def _deviations(lines: int, freedom: float) -> float:
    """Return by how many standard errors an interval reaches to either side, if `lines` are to hold together."""
    return t_quantile((1 - CONFIDENCE) / 2 / lines, freedom)


@functools.lru_cache(maxsize=1024)
def t_quantile(tail: float, freedom: float) -> float:
    """Return what Student's t with so many degrees of freedom, 1 or more, exceeds with the probability `tail`.

    With t = sqrt(freedom) * tan(angle) the density is cos(angle) ** (freedom - 1), which is summed up from its far end.
    """
    width = math.pi / 2 / _ANGLES
    heights = [math.sin(number * width) ** (freedom - 1) for number in range(_ANGLES + 1)]  # the angle from its far end
    pieces = [(one + following) / 2 for one, following in itertools.pairwise(heights)]
    wanted, reached = 2 * tail * sum(pieces), 0.0
    for number, piece in enumerate(pieces):
        if reached + piece >= wanted:
            return math.sqrt(freedom) / math.tan((number + (wanted - reached) / piece) * width)
        reached += piece
    return 0.0
