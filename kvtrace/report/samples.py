"""The requests of one mode and scope of a store, as blocks of consecutive ones: sums, counts and percentiles by SQL.

However many requests there are, what is read is a few numbers for each of the `BLOCKS` blocks.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrace import verdict
from kvtrace.intervals import BLOCKS, Estimate, estimate, ranks, spread
from kvtrace.report.population import AROUND
from kvtrace.verdict import UNDER_WAY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrace.store import Store

FIGURES = ("ttft_ns", "tpot_ns", "prompt_tokens", "output_tokens")
"""What is compared of requests, by its column."""
PERCENTILES = tuple(name for name, _, _ in AROUND)
_QUANTILES = [quantile for _, quantile, _ in AROUND]

# What another program left untold in a store is a group like any other.
_MODE, _SCOPE = "coalesce(mode, 'unknown')", "coalesce(scope, 'unknown')"
_OF_GROUP = f"{_MODE} = $mode AND {_SCOPE} = $scope AND ttft_ns IS NOT NULL"

_GROUPS_SQL = f"""
SELECT {_MODE} AS mode, {_SCOPE} AS scope,
  CASE WHEN seen_ns IS NULL THEN coalesce(verdict, 'unknown') ELSE $under_way END AS verdict,
  count(*) AS requests, count(ttft_ns) AS timed
FROM request LEFT JOIN under_way USING (request_key) GROUP BY ALL ORDER BY mode, scope, requests DESC, verdict
"""

_ENGINES_SQL = f"""
SELECT count(DISTINCT nullif(prefill_engine, '')) AS prefill, count(DISTINCT nullif(decode_engine, '')) AS decode
FROM request WHERE {_OF_GROUP}
"""

# In the order of arrival, every block as many requests as the next, but for one.
_PLACED = f"""placed AS (
  SELECT *, (row_number() OVER (ORDER BY start_ns, request_key) - 1) * $blocks // count(*) OVER () AS block
  FROM request WHERE {_OF_GROUP}
)"""
_VALUES = f"""value AS (
  UNPIVOT (SELECT block, {", ".join(FIGURES)} FROM placed) ON {", ".join(FIGURES)} INTO NAME figure VALUE value
)"""

_FIGURES_SQL = f"""
WITH {_PLACED}, {_VALUES}, whole AS (
  SELECT figure, quantile_cont(value, $quantiles) AS quantiles FROM value GROUP BY figure
)
SELECT figure, block, any_value(quantiles) AS quantiles, count(*) AS requests, sum(value) AS total,
  [count(*) FILTER (value <= quantiles[1]), count(*) FILTER (value <= quantiles[2]),
   count(*) FILTER (value <= quantiles[3])] AS below
FROM value JOIN whole USING (figure) GROUP BY ALL
"""

_CAUSES_SQL = f"""
WITH {_PLACED}
SELECT segment.cause, segment.class AS class, block, sum(segment.end_ns - segment.start_ns) AS total
FROM segment JOIN placed USING (request_key) GROUP BY ALL ORDER BY ALL
"""

_ENDS_SQL = f"""
WITH {_PLACED}, {_VALUES}
SELECT quantile_cont(value, $quantiles) AS ends FROM value WHERE figure = $figure
"""

# The rates of `findings.rates`, by gaps between arrivals and between completions.
_GAPS_SQL = """
WITH moment AS (
  SELECT 'offered_rate_hz' AS rate, start_ns AS at_ns FROM request
  UNION ALL
  SELECT 'served_rate_hz', end_ns FROM request
  WHERE ttft_ns IS NOT NULL AND end_ns IS NOT NULL AND NOT list_contains($cut, verdict::VARCHAR)
), gap AS (
  SELECT rate, row_number() OVER (PARTITION BY rate ORDER BY at_ns) - 2 AS place,
    count(*) OVER (PARTITION BY rate) - 1 AS gaps,
    at_ns - lag(at_ns) OVER (PARTITION BY rate ORDER BY at_ns) AS gap_ns
  FROM moment
)
SELECT rate, place * $blocks // gaps AS block, count(*) AS gaps, sum(gap_ns) AS total_ns
FROM gap WHERE place >= 0 GROUP BY ALL
"""


@dataclass(slots=True)
class Group:
    """How many requests of one mode and scope a store holds, by verdict, and how many had a first token."""

    mode: str
    scope: str
    requests: int = 0
    with_first_token: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Figure:
    """One figure of a group's requests by block: sums, counts, how many up to each percentile; those percentiles."""

    sums: list[int]
    counts: list[int]
    below: dict[str, list[int]]
    quantiles: dict[str, float]

    @property
    def requests(self) -> int:
        """Return how many requests have that figure."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Sample:
    """A group's requests that had a first token: figures, and by (cause, class) the path's time in ns of each block."""

    group: Group
    figures: dict[str, Figure]
    causes: dict[tuple[str, str], list[int]]
    engines: dict[str, int]


def groups(store: Store) -> list[Group]:
    """Return the store's requests by mode and scope."""
    found: dict[tuple[str, str], Group] = {}
    for row in store.rows(_GROUPS_SQL, {"under_way": UNDER_WAY}):
        group = found.setdefault((row["mode"], row["scope"]), Group(row["mode"], row["scope"]))
        group.requests += row["requests"]
        group.with_first_token += row["timed"]
        group.verdicts[row["verdict"]] = row["requests"]
    return list(found.values())


def read(store: Store, group: Group) -> Sample:
    """Return the sample of one of the store's groups."""
    which = {"mode": group.mode, "scope": group.scope}
    figures: dict[str, Figure] = {}
    for row in store.rows(_FIGURES_SQL, {**which, "blocks": BLOCKS, "quantiles": _QUANTILES}):
        if (figure := figures.get(row["figure"])) is None:
            below = {name: [0] * BLOCKS for name in PERCENTILES}
            quantiles = dict(zip(PERCENTILES, row["quantiles"], strict=True))
            figure = figures[row["figure"]] = Figure([0] * BLOCKS, [0] * BLOCKS, below, quantiles)
        figure.sums[row["block"]], figure.counts[row["block"]] = int(row["total"]), row["requests"]
        for name, count in zip(PERCENTILES, row["below"], strict=True):
            figure.below[name][row["block"]] = count
    causes: dict[tuple[str, str], list[int]] = {}
    for row in store.rows(_CAUSES_SQL, {**which, "blocks": BLOCKS}):
        if row["total"]:
            causes.setdefault((row["cause"], row["class"]), [0] * BLOCKS)[row["block"]] = int(row["total"])
    return Sample(group, figures, causes, store.rows(_ENGINES_SQL, which)[0])


def percentiles(store: Store, sample: Sample, name: str, lines: int) -> dict[str, Estimate]:
    """Return the percentiles of a figure with intervals, of which `lines` are to hold together."""
    figure = sample.figures[name]
    bounds = {
        percentile: ranks(spread(figure.below[percentile], figure.counts), quantile, figure.requests, lines)
        for percentile, quantile, _ in AROUND
    }
    asked = [end for ends in bounds.values() if ends for end in ends]
    ends = iter(_ends(store, sample.group, name, asked))
    return {
        percentile: Estimate(figure.quantiles[percentile], *((next(ends), next(ends)) if bounded else ()))
        for percentile, bounded in bounds.items()
    }


def _ends(store: Store, group: Group, figure: str, quantiles: list[float]) -> Iterable[float]:
    if not quantiles:
        return []
    which = {"mode": group.mode, "scope": group.scope, "blocks": BLOCKS, "figure": figure, "quantiles": quantiles}
    ends: list[float] = store.rows(_ENDS_SQL, which)[0]["ends"]
    return ends


def rates(store: Store) -> dict[str, Estimate]:
    """Return offered and served requests/s of a whole store with intervals that hold together; {} where nothing moves.

    They are those of `findings.rates`, which says whether there are enough requests for them.
    """
    gaps: dict[str, tuple[list[int], list[float]]] = {}
    for row in store.rows(_GAPS_SQL, {"blocks": BLOCKS, "cut": [verdict.ABORTED, verdict.FAILED]}):
        counts, lengths_s = gaps.setdefault(row["rate"], ([0] * BLOCKS, [0.0] * BLOCKS))
        counts[row["block"]], lengths_s[row["block"]] = row["gaps"], int(row["total_ns"]) / 1e9
    return {
        name: estimate(spread(counts, lengths_s), len(gaps))
        for name, (counts, lengths_s) in sorted(gaps.items())
        if any(lengths_s)
    }
