"""What findings share: the thresholds, and how numbers are put into words."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace import stages
from kvtrace.findings.model import Finding, Grade, Group
from kvtrace.modes import PULL, PUSH
from kvtrace.wording import ms

LEAST_REQUESTS = 20  # fewer tell of themselves, not of a system
SHARE = 0.10  # of all time to first token: less is not worth a sentence
LATE_PART = 0.20  # of a group's push requests
LEADING_PART = 0.60  # of the time, for what is named as the reason
LAST_PART = 0.80  # of the requests in which one rank is the last
RECOMPUTE_SHARE = 0.20  # every hand-off of today computes the first token again: only a large part is worth a sentence
HELD_NS = 1_000_000_000  # an engine needs some steps to hear of an abort
EVENTS = 3  # things that must not happen at all need no twenty


def part(share: float, whole: float) -> str:
    """Return a share of a whole in percent; a small one is not called nothing."""
    percent = 100 * share / whole if whole else 0.0
    return f"{percent:.0f} %" if percent >= 1 or not percent else "<1 %"


def spread(median_ns: float, p90_ns: float, requests: int) -> str:
    """Return how long something took, and how unevenly: median and p90, where there are requests enough for one."""
    told = f"{ms(median_ns)} at the median"
    return f"{told}, {ms(p90_ns)} at p90" if requests >= LEAST_REQUESTS and p90_ns else told


def of_all(time_ns: float, group: Group) -> str:
    """Return a time as a part of the time to first token of all requests of a group."""
    return f"{part(time_ns, group.ttft_ns)} of the time to first token of all {group.requests:,} together"


def of(group: Group) -> str:
    """Return which requests a sentence is about."""
    return f"{group.mode}, scope {group.scope}"


def remedy_in(mode: str, cause: stages.Cause) -> str:
    """Return what usually helps against a cause where requests are of that mode."""
    return {PUSH: cause.push, PULL: cause.pull}.get(mode) or cause.remedy


def finding(
    name: str, sentence: str, grade: Grade, cause: stages.Cause | None, stake_ns: int, query: str,
    examples: Iterable[str], remedy: str | None = None, mode: str = "",
) -> Finding:  # fmt: skip
    """Return a finding about a cause, whose class and remedy in that mode it takes; `stake_ns` is what it costs in all.

    Without a cause it names neither; with `remedy` that one.
    """
    kind, usual = (cause.kind.value, remedy_in(mode, cause)) if cause is not None else ("", "")
    return Finding(name, sentence, grade, kind, usual if remedy is None else remedy, stake_ns, query, tuple(examples))
