"""Aggregates over events of some stages: what a pivot of events is made of, as SQL text."""

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.shape import text

_REF = 'hash("ref")'
SAID = "\"ref\" <> ''"
"""The condition that an event refers to something."""


def among(*wanted: stages.Stage) -> str:
    """Return the condition that an event is of one of these stages, as ranges: a list of many makes DuckDB join."""
    places = sorted({stages.STAGES.index(stage) for stage in wanted})
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return f"({' OR '.join(_run(stages.STAGES[run[0]], stages.STAGES[run[-1]]) for run in runs)})"


def _run(first_: stages.Stage, last: stages.Stage) -> str:
    if first_ is last:
        return f"stage = {text(first_.name)}::stage"
    # Without the casts DuckDB compares names, in alphabetical order.
    return f"stage BETWEEN {text(first_.name)}::stage AND {text(last.name)}::stage"


def when(what: str, *wanted: stages.Stage, but: str = "") -> str:
    """Return `what` for events of these stages, NULL for others.

    An aggregate over this is many times cheaper than one with a FILTER, for which DuckDB copies what all of them read.
    """
    return f"CASE WHEN {among(*wanted)}{f' AND {but}' if but else ''} THEN {what} END"


def least(what: str, *wanted: stages.Stage, but: str = "") -> str:
    """Return the least of `what` among the events of these stages."""
    return f"min({when(what, *wanted, but=but)})"


def most(what: str, *wanted: stages.Stage, but: str = "") -> str:
    """Return the greatest of `what` among the events of these stages."""
    return f"max({when(what, *wanted, but=but)})"


def count(*wanted: stages.Stage) -> str:
    """Return how many events of these stages there are."""
    return f"count({when('1', *wanted)})"


def first(what: str, *wanted: stages.Stage, but: str = "") -> str:
    """Return `what` of the earliest event of these stages."""
    return f"arg_min({what}, {when('t_ns', *wanted, but=but)})"


def last(what: str, *wanted: stages.Stage) -> str:
    """Return `what` of the last event of these stages."""
    return f"arg_max({what}, {when('t_ns', *wanted)})"


def named(name: str, stage: stages.Stage) -> str:
    """Return the least and the greatest hash of what a stage's events refer to: texts would cost many times more."""
    return f"{least(_REF, stage, but=SAID)} AS {name}0, {most(_REF, stage, but=SAID)} AS {name}1"


def spread(name: str, stage: stages.Stage) -> str:
    """Return how many events of a stage there are, the first and the last: enough to choose among two."""
    return f"{count(stage)} AS {name}_n, {least('t_ns', stage)} AS {name}_mn, {most('t_ns', stage)} AS {name}_mx"
