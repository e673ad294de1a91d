"""The steps of a fleet's engines: a train of steps for each, whose times follow from its number alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtrace.testing.fleet import Fleet

Times = npt.NDArray[np.int64]

PREFILL, DECODE = 0, 1
_US = 1_000
# Per side: from one step to the next, and in it scheduled to started, forwarded, connected, ended. Microseconds.
_PERIOD_US = (40_000, 25_000)
_INSIDE_US = ((300, 38_000, 38_500, 39_200), (250, 22_800, 23_300, 24_300))
_JITTER_US = 200


class Grid:
    """When each step of each engine takes place."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def next(self, side: int, pair: Times, after_ns: Times) -> Times:
        """Return the number of the first step whose making up begins well after that time."""
        period_ns = _PERIOD_US[side] * _US
        return np.asarray((after_ns - self._zero_ns(side, pair) + 150 * _US) // period_ns + 1)

    def between(self, side: int, pair: int, begin_ns: int, end_ns: int) -> Times:
        """Return the numbers of the steps of one engine that begin in that time, as the plan has it."""
        period_ns = _PERIOD_US[side] * _US
        zero_ns = int(self._zero_ns(side, np.array([pair]))[0])
        return np.arange(-(-(begin_ns - zero_ns) // period_ns), -(-(end_ns - zero_ns) // period_ns))

    def times(self, side: int, pair: Times, number: Times) -> tuple[Times, ...]:
        """Return when these steps were scheduled, started, forwarded, connected and ended; unix ns."""
        planned = self._zero_ns(side, pair) + number * (_PERIOD_US[side] * _US)
        scheduled = planned + self._jitter_ns(side, pair, number, 0)
        inside = (
            planned + at_us * _US + self._jitter_ns(side, pair, number, place)
            for place, at_us in enumerate(_INSIDE_US[side], start=1)
        )
        return scheduled, *inside

    def _zero_ns(self, side: int, pair: Times) -> Times:
        """Return when step 0 was planned; each engine has its own phase."""
        return np.asarray(self._fleet.start_ns - 10_000_000_000 + (pair * 7_310 + side * 3_170) * _US)

    def _jitter_ns(self, side: int, pair: Times, number: Times, place: int) -> Times:
        """Return a duration that looks random and follows from the step: the low bits of a mixed number."""
        mixed = (number.astype(np.uint64) * np.uint64(8) + np.uint64(place)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= (pair.astype(np.uint64) * np.uint64(2) + np.uint64(side)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
        return (mixed >> np.uint64(33)).astype(np.int64) % (_JITTER_US * _US)
