"""Two recordings compared, ready for JSON: what differs with intervals, what else differs, what is left out and why.

Requests of one mode and scope are compared with requests of the same, or one mode with another where each recording has
one only. A difference is the first recording's figure less the second's. Means by cause count a request without it as
0, so that they add up to the mean TTFT and their differences to its difference.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvtrace import intervals
from kvtrace.findings.terms import EVENTS, LEAST_REQUESTS
from kvtrace.intervals import Estimate, estimate, spread
from kvtrace.modes import PULL, PUSH
from kvtrace.report import population, samples, selection, settings
from kvtrace.verdict import COMPLETE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvtrace.report.samples import Figure, Group, Sample
    from kvtrace.store import Store

Row = dict[str, Any]

SIDES = ("run", "against")
"""The recording that is explained, and the one that it is compared with."""
WAITED = ("ttft_ns", "tpot_ns")
"""Figures of what was served."""
ASKED = ("prompt_tokens", "output_tokens")
"""Figures of what was asked for."""
SATURATED, WANDERS, FEW = "saturated", "wanders", "few requests"
"""Why the differences of a group have no intervals."""
_DIGITS = {"prompt_tokens": 1, "output_tokens": 1, "offered_rate_hz": 3, "served_rate_hz": 3}
_VERDICT_SHARE = 0.01

_LOST_SQL = "SELECT coalesce(sum(lost_records), 0)::BIGINT AS lost_records FROM process"


def compare(run: Store, against: Store) -> Row:
    """Return the comparison of two open stores; times in ns, rates in requests/s."""
    facts = selection.run_facts(run), selection.run_facts(against)
    groups = samples.groups(run), samples.groups(against)
    pairs = list(_pairs(*groups))
    load = _load((run, against), facts)
    saturated = [side for side in SIDES if load[side] and load[side]["saturated"]]
    same_mode = all(one.mode == other.mode for one, other in pairs)
    compared = [_group((run, against), pair, saturated) for pair in pairs]
    return {
        "load": load,
        "differs": settings.differing(*facts, same_mode=same_mode),
        "flags_known": _by_side(settings.tells_flags(one) for one in facts),
        "lost_records": _by_side(store.rows(_LOST_SQL)[0]["lost_records"] for store in (run, against)),
        "is_same": run is against,
        "is_recording": _by_side(one.get("recorder.state") == "recording" for one in facts),
        "groups": sorted(compared, key=_weight, reverse=True),
        "not_compared": [
            {"in": side, **_counts(group)}
            for place, side in enumerate(SIDES)
            for group in groups[place]
            if group.requests and group not in [pair[place] for pair in pairs]
        ],
    }


def _by_side(values: Iterable[object]) -> Row:
    return dict(zip(SIDES, values, strict=True))


def _weight(group: Row) -> int:
    return min(int(group[side]["with_first_token"]) for side in SIDES)


def _pairs(run: Sequence[Group], against: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Yield the groups to compare: of one scope, and of one mode or of the two that only one of the stores has."""
    timed = [[group for group in side if group.with_first_token] for side in (run, against)]
    modes = [{group.mode for group in side} for side in timed]
    alike = [(mode, mode) for mode in sorted(modes[0] & modes[1])]
    left = modes[0] - modes[1], modes[1] - modes[0]
    for wanted in (modes[0] | modes[1], {PUSH, PULL}):
        rest = [sorted(side & wanted) for side in left]
        if [len(side) for side in rest] == [1, 1]:
            alike.append((rest[0][0], rest[1][0]))
            break
    for one, other in alike:
        for group in timed[0]:
            fits = (g for g in timed[1] if g.mode == other and g.scope == group.scope)
            if group.mode == one and (match := next(fits, None)):
                yield group, match


def _load(stores: tuple[Store, Store], facts: tuple[Mapping[str, str], Mapping[str, str]]) -> Row:
    """Return how much was asked for and served in either run, and by how much that differs; {} where too few."""
    found = [population.load(store, said) for store, said in zip(stores, facts, strict=True)]
    rates: Row = {}
    if all(found):
        seen = [samples.rates(store) for store in stores]
        rates = {name: _line(name, one, seen[1][name]) for name, one in seen[0].items() if name in seen[1]}
    return {"run": found[0], "against": found[1], "rates": rates}


def _group(stores: tuple[Store, Store], pair: tuple[Group, Group], saturated: Sequence[str]) -> Row:
    """Return the comparison of one group of each store."""
    sides = samples.read(stores[0], pair[0]), samples.read(stores[1], pair[1])
    few = min(group.with_first_token for group in pair) < LEAST_REQUESTS
    wanders = [side for side, one in zip(SIDES, sides, strict=True) if not few and _wanders(one)]
    why = SATURATED if saturated else FEW if few else WANDERS if wanders else None
    names = [name for name in samples.FIGURES if all(name in one.figures for one in sides)]
    waited = [name for name in names if name in WAITED]
    asked = [name for name in names if name in ASKED]
    return {
        **_by_side(map(_described, sides)),
        "no_intervals": why,
        "because_of": list(saturated) or wanders,
        **{name: _figure(stores, sides, name, len(waited), judged=why is None) for name in waited},
        **{name: _figure(stores, sides, name, len(asked), judged=not few) for name in asked},
        **_causes(sides, judged=why is None),
        "verdicts": _verdicts(pair),
    }


def _wanders(sample: Sample) -> bool:
    ttft = sample.figures["ttft_ns"]
    return spread(ttft.sums, ttft.counts).correlation > intervals.WANDERING


def _described(sample: Sample) -> Row:
    group = sample.group
    return {**_counts(group), "verdicts": group.verdicts, "engines": sample.engines}


def _counts(group: Group) -> Row:
    return {
        "mode": group.mode,
        "scope": group.scope,
        "requests": group.requests,
        "with_first_token": group.with_first_token,
    }


def _figure(stores: tuple[Store, Store], sides: tuple[Sample, Sample], name: str, figures: int, *, judged: bool) -> Row:
    """Return mean and percentiles of a figure, one of so many whose intervals hold together."""
    lines = figures * (1 + len(samples.PERCENTILES))
    judged = judged and min(one.figures[name].requests for one in sides) >= LEAST_REQUESTS
    both = [
        samples.percentiles(store, one, name, lines) if judged else _bare(one.figures[name])
        for store, one in zip(stores, sides, strict=True)
    ]
    return {
        "mean": _mean(sides, name, lines, judged=judged),
        **{percentile: _line(name, both[0][percentile], both[1][percentile]) for percentile in samples.PERCENTILES},
    }


def _mean(sides: tuple[Sample, Sample], name: str, lines: int, *, judged: bool) -> Row:
    """Return the line of a figure's mean, rounded as those by cause, so that they add up to it."""
    figures = [one.figures[name] for one in sides]
    around = [estimate(spread(one.sums, one.counts), lines) for one in figures]
    if name in _DIGITS:
        return _line(name, around[0], around[1], judged=judged)
    shown = [intervals.apportioned([sum(one.sums)], one.requests)[0] for one in figures]
    return _line(name, around[0], around[1], judged=judged, shown=(shown[0], shown[1]))


def _bare(figure: Figure) -> dict[str, Estimate]:
    return {name: Estimate(value) for name, value in figure.quantiles.items()}


def _causes(sides: tuple[Sample, Sample], *, judged: bool) -> Row:
    """Return mean times by class and by cause, all of whose intervals hold together, the greatest difference first."""
    causes = sorted({*sides[0].causes, *sides[1].causes})
    kinds = [kind for kind in population.CLASSES if any(kind == other for _, other in causes)]
    lines = len(causes) + len(kinds)
    nothing = [0] * intervals.BLOCKS
    by_cause = [[one.causes.get(cause, nothing) for cause in causes] for one in sides]
    means = [
        dict(zip(causes, intervals.apportioned([sum(sums) for sums in found], one.group.with_first_token), strict=True))
        for one, found in zip(sides, by_cause, strict=True)
    ]

    def row(of: Sequence[tuple[str, str]]) -> Row:
        """Return the line of all these causes together."""
        seen = []
        for one, mean in zip(sides, means, strict=True):
            sums = [sum(parts) for parts in zip(*(one.causes.get(cause, nothing) for cause in of), strict=True)]
            around = estimate(spread(sums, one.figures["ttft_ns"].counts), lines)
            seen.append((around, sum(mean[cause] for cause in of)))
        return _line("", seen[0][0], seen[1][0], judged=judged, shown=(seen[0][1], seen[1][1]))

    found = [{"cause": cause, "class": kind, **row([(cause, kind)])} for cause, kind in causes]
    return {
        "classes": [{"class": kind, **row([one for one in causes if one[1] == kind])} for kind in kinds],
        "causes": sorted(found, key=lambda one: -abs(one["difference"])),
    }


def _line(
    name: str, run: Estimate, against: Estimate, *, judged: bool = True, shown: tuple[int, int] | None = None
) -> Row:
    """Return a figure of both with its difference, interval, and whether that excludes 0; None where there is none.

    Times are whole ns; `shown` are values that were rounded so that they add up.
    """
    digits = _DIGITS.get(name, 0)
    one, other = shown or (_rounded(run.value, digits), _rounded(against.value, digits))
    difference = _rounded(one - other, digits)
    line: Row = {"run": one, "against": other, "difference": difference, "low": None, "high": None, "told_apart": None}
    found = intervals.difference(run, against)
    if not judged or found.low is None or found.high is None:
        return line
    unit = 10**digits
    low = min(difference, _rounded(math.floor(round(found.low * unit, 6)) / unit, digits))
    high = max(difference, _rounded(math.ceil(round(found.high * unit, 6)) / unit, digits))
    return {**line, "low": low, "high": high, "told_apart": low > 0 or high < 0}


def _rounded(value: float, digits: int) -> float:
    """Return the value with so many decimals; an int for none."""
    return round(value, digits) if digits else round(value)


def _verdicts(pair: tuple[Group, Group]) -> list[Row]:
    """Return the verdicts but complete whose shares of all requests differ by a hundredth or more, with these.

    What became of fewer than `EVENTS` requests on either side may be chance.
    """
    names = dict.fromkeys(name for group in pair for name in group.verdicts if name != COMPLETE)
    shares = [{name: group.verdicts.get(name, 0) / group.requests for name in names} for group in pair]
    return [
        {"verdict": name, "run": shares[0][name], "against": shares[1][name]}
        for name in names
        if abs(shares[0][name] - shares[1][name]) >= _VERDICT_SHARE
        and max(group.verdicts.get(name, 0) for group in pair) >= EVENTS
    ]
