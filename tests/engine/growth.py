"""By how much a duration differs between two kinds of requests, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from tests.engine.deployment import Answer

_DRAWS = 4000
_TAIL = 0.0005  # at either end: a run asks this of hundreds of causes
_WIDEST_MS = 12.0  # twice the tolerance on either side: a wider interval could hide what is asked for


@dataclass(frozen=True)
class Growth:
    """The difference of two medians, ms, with its 99.9 % bootstrap interval."""

    median_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, delayed: list[Answer], plain: list[Answer], duration_ms: Callable[[Answer], float]) -> Self:
        """Return by how much the median of a duration differs between the two."""
        source = np.random.default_rng(1)
        delayed_ms, plain_ms = (np.array([duration_ms(answer) for answer in answers]) for answers in (delayed, plain))
        drawn = drawn_medians(delayed_ms, source) - drawn_medians(plain_ms, source)
        low_ms, high_ms = np.quantile(drawn, (_TAIL, 1 - _TAIL))
        return cls(float(np.median(delayed_ms) - np.median(plain_ms)), float(low_ms), float(high_ms))

    def is_near(self, expected_ms: float, tolerance_ms: float) -> bool:
        """Return whether it is the expected growth, give or take the tolerance."""
        return abs(self.median_ms - expected_ms) <= tolerance_ms

    def may_be_near(self, expected_ms: float, tolerance_ms: float) -> bool:
        """Return whether nothing but noise says otherwise: the interval reaches the tolerance, and is tight."""
        reaches = self.low_ms - expected_ms <= tolerance_ms and self.high_ms - expected_ms >= -tolerance_ms
        return reaches and self.high_ms - self.low_ms < _WIDEST_MS

    def __repr__(self) -> str:
        return f"{self.median_ms:.1f} ({self.low_ms:.1f} to {self.high_ms:.1f})"


def drawn_medians(values: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """Return medians of samples drawn from the values with replacement, as many as values, without drawing them all.

    A sample sorted is the values at the ranks of sorted uniform numbers, of which only the middle ones count: the k-th
    of n is beta(k, n + 1 - k), and the next one the least of n - k more between it and 1.
    """
    ordered, n = np.sort(values), len(values)
    k = (n + 1) // 2
    low = source.beta(k, n + 1 - k, _DRAWS)
    if n % 2:
        return ordered[_ranks(low, n)]
    high = 1 - (1 - low) * source.random(_DRAWS) ** (1 / (n - k))
    return (ordered[_ranks(low, n)] + ordered[_ranks(high, n)]) / 2


def _ranks(uniform: np.ndarray, n: int) -> np.ndarray:
    return np.minimum((uniform * n).astype(np.intp), n - 1)
