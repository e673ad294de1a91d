"""Intervals of two recordings' difference: right as often as they say, also where requests wait for one another."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace.intervals import (
    BLOCKS,
    WANDERING,
    Estimate,
    Spread,
    apportioned,
    difference,
    estimate,
    ranks,
    spread,
    t_quantile,
)


@pytest.mark.parametrize(
    ("tail", "freedom", "expected"),
    [(0.025, 1, 12.7062), (0.025, 3, 3.18245), (0.025, 19, 2.09302), (0.005, 19, 2.86093), (0.025, 38, 2.02439)],
)
def test_students_t_is_that_of_the_tables(tail: float, freedom: float, expected: float) -> None:
    assert t_quantile(tail, freedom) == pytest.approx(expected, rel=1e-5)


def test_the_error_of_a_mean_follows_from_how_blocks_differ() -> None:
    """Blocks of 10 requests with means 1 and 3, by turns: a scatter of 1 around 2, twenty times."""
    seen = spread([10, 30] * 10, [10] * BLOCKS)

    assert (seen.value, seen.freedom) == (2, 19)
    assert seen.error == pytest.approx(math.sqrt(20 / 19) / math.sqrt(20))
    assert seen.correlation < 0


def test_blocks_that_are_like_their_neighbours_are_worth_less() -> None:
    """The same blocks, ten low ones before ten high ones: one step is all that is seen, not twenty draws."""
    by_turns, sorted_out = spread([10, 30] * 10, [10] * BLOCKS), spread([10] * 10 + [30] * 10, [10] * BLOCKS)

    assert sorted_out.correlation > WANDERING
    assert sorted_out.error > 3 * by_turns.error
    assert sorted_out.freedom < 3


def test_blocks_that_do_not_differ_leave_no_doubt() -> None:
    assert estimate(spread([50] * BLOCKS, [10] * BLOCKS)) == Estimate(5, 5, 5)


@pytest.mark.parametrize(("sums", "counts"), [([1], [1]), ([0, 0], [0, 0])])
def test_nothing_has_no_spread(sums: list[int], counts: list[int]) -> None:
    with pytest.raises(ValueError, match="no spread"):
        spread(sums, counts)


def test_more_lines_together_need_wider_intervals() -> None:
    seen = Spread(10.0, 1.0, 19.0, 0.0)
    alone, one_of_ten = estimate(seen), estimate(seen, 10)

    assert alone.high == pytest.approx(10 + 2.09302, rel=1e-5)
    assert one_of_ten.high == pytest.approx(10 + t_quantile(0.0025, 19))


@pytest.mark.parametrize(("requests", "bounded"), [(300, False), (2_000, True)])
def test_a_high_percentile_of_few_requests_has_no_bound(requests: int, bounded: bool) -> None:
    """However alike the blocks are: of 300 independent requests, 3 lie beyond p99, or none, or 9."""
    found = ranks(Spread(0.99, 0.0, 19.0, 0.0), 0.99, requests)

    assert (found is not None) == bounded
    assert found is None or found[0] < 0.99 < found[1] < 1


def test_an_uneven_interval_stays_uneven() -> None:
    """13 (10 to 17) less 5 (5 to 5), and the other way round."""
    one, other = Estimate(13, 10, 17), Estimate(5, 5, 5)

    assert difference(one, other) == Estimate(8, 5, 12)
    assert difference(other, one) == Estimate(-8, -12, -5)
    assert difference(one, Estimate(5)) == Estimate(8)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40), st.integers(1, 10**6))
def test_rounded_parts_add_up_to_the_rounded_whole(totals: list[int], count: int) -> None:
    parts = apportioned(totals, count)

    assert sum(parts) == apportioned([sum(totals)], count)[0]
    assert all(abs(part - Fraction(total, count)) < 1 for part, total in zip(parts, totals, strict=True))


# How often two recordings of one and the same thing are told apart ------------------------------------------


def independent(chance: random.Random, requests: int) -> list[float]:
    return [chance.lognormvariate(4, 1) for _ in range(requests)]


def queued(load: float) -> Callable[[random.Random, int], list[float]]:
    """Return times in a queue of one server, for that part of the time busy, once it has run for a while."""

    def times(chance: random.Random, requests: int) -> list[float]:
        found, wait = [], 0.0
        for _ in range(requests + 300):
            served = chance.expovariate(1)
            found.append(wait + served)
            wait = max(0.0, wait + served - chance.expovariate(load))
        return found[300:]

    return times


def mean_of(times: Sequence[float]) -> Spread:
    ends = [number * len(times) // BLOCKS for number in range(BLOCKS + 1)]
    blocks = [times[begin:end] for begin, end in itertools.pairwise(ends)]
    return spread([sum(block) for block in blocks], [len(block) for block in blocks])


def told_apart(make: Callable[[random.Random, int], list[float]], requests: int) -> tuple[float, float]:
    """Return how often two draws of the same are told apart, by blocks and as if requests were independent."""
    chance, tries, by_blocks, as_independent = random.Random(7), 200, 0, 0
    for _ in range(tries):
        one, other = make(chance, requests), make(chance, requests)
        seen = mean_of(one), mean_of(other)
        if max(side.correlation for side in seen) <= WANDERING:
            found = difference(estimate(seen[0]), estimate(seen[1]))
            by_blocks += found.low > 0 or found.high < 0
        error = math.sqrt((statistics.variance(one) + statistics.variance(other)) / requests)
        as_independent += abs(statistics.fmean(one) - statistics.fmean(other)) > 1.96 * error
    return by_blocks / tries, as_independent / tries


@pytest.mark.parametrize("requests", [24, 400])
def test_independent_requests_of_one_kind_are_rarely_told_apart(requests: int) -> None:
    by_blocks, as_independent = told_apart(independent, requests)

    assert by_blocks <= 0.07
    assert as_independent <= 0.1


@pytest.mark.parametrize("requests", [24, 100, 400])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_queue_is_rarely_told_apart_from_itself(load: float, requests: int) -> None:
    """Where requests are taken for independent draws, one queue differs from itself in half of all comparisons.

    A queue that is busy for longer than 24 requests cannot be seen in as many, so that these stay a little too bold.
    """
    by_blocks, as_independent = told_apart(queued(load), requests)

    assert by_blocks <= (0.12 if requests < 100 else 0.07)
    assert as_independent > 0.35


def test_a_difference_that_is_there_is_told_and_is_within_its_interval() -> None:
    """A queue that takes half as long again, which is 1 more: one of that load takes 2 in the mean."""
    chance, make, tries, told, within = random.Random(3), queued(0.5), 50, 0, 0
    for _ in range(tries):
        one, other = mean_of([1.5 * time for time in make(chance, 2_000)]), mean_of(make(chance, 2_000))
        found = difference(estimate(one), estimate(other))
        told += found.low > 0
        within += found.low < 1 < found.high

    assert told >= 0.9 * tries
    assert within >= 0.88 * tries
