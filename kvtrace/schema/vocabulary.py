"""The views that say what things mean: stages, causes, and events with their payload named.

Generated from `kvtrace.stages`, so that a bare DuckDB client reads the same words as the README.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.shape import View, at_time, columns, text


def _slot(stage: stages.Stage, slot: str) -> str:
    for field in stage.fields:
        if field.slot == slot:
            return text(f"{field.name} [{field.unit}]" if field.unit else field.name)
    return "''"


def _vocabulary_sql() -> str:
    rows = ",\n    ".join(
        f"({text(stage.name)}, {stage.code}, {text(stage.where.value)}, {text(stage.doc)}, "
        + ", ".join(_slot(stage, slot) for slot in ("a", "b", "c", "d", "ref"))
        + ")"
        for stage in stages.STAGES
    )
    return (
        'SELECT stage::stage AS stage, code::INTEGER AS code, "where", doc, a, b, c, d, ref\n'
        f'FROM (VALUES\n    {rows}\n) AS v(stage, code, "where", doc, a, b, c, d, ref)'
    )


def _cause_sql() -> str:
    rows = ",\n    ".join(
        f"({text(cause.name)}, {text(cause.kind.value)}, {text(cause.kind.answer)}, {text(cause.where.value)}, "
        f"{text(cause.doc)}, {text(cause.remedy)})"
        for cause in stages.CAUSES
    )
    return f'SELECT * FROM (VALUES\n    {rows}\n) AS v(cause, class, answer, "where", doc, remedy)'


def _event_named_sql() -> str:
    """Return the SELECT that gives each event's payload its names: one CASE branch per stage with numbers."""
    branches = []
    for stage in stages.STAGES:
        numbers = [field for field in stage.fields if field.slot != "ref"]
        if numbers:
            keys = ", ".join(text(field.name) for field in numbers)
            values = ", ".join(f"e.{field.slot}" for field in numbers)
            branches.append(f"    WHEN {text(stage.name)} THEN map([{keys}], [{values}])")
    case = "\n".join(branches)
    return f"""SELECT
  {at_time("e.t_ns")} AS ts, e.t_ns, e.process, p.kind, p.engine, e.stage, e.request,
  CASE e.stage
{case}
    ELSE map(CAST([] AS VARCHAR[]), CAST([] AS BIGINT[]))
  END AS payload,
  e.ref
FROM event AS e LEFT JOIN engine_process AS p USING (process)"""


VOCABULARY = View(
    "vocabulary",
    "What every stage means and what it keeps in a, b, c, d and ref.",
    columns(
        ("stage", "stage", "Name of the stage."),
        ("code", "INTEGER", "Its code on the wire."),
        ("where", "VARCHAR", "The kind of process that stamps it."),
        ("doc", "VARCHAR", "What it says."),
        ("a", "VARCHAR", "Name and unit of payload a."),
        ("b", "VARCHAR", "Name and unit of payload b."),
        ("c", "VARCHAR", "Name and unit of payload c."),
        ("d", "VARCHAR", "Name and unit of payload d."),
        ("ref", "VARCHAR", "Name of the text payload."),
    ),
    _vocabulary_sql(),
)

CAUSE = View(
    "cause",
    "What every cause means, which class it counts for, and what usually helps.",
    columns(
        ("cause", "VARCHAR", "Name of the cause."),
        ("class", "VARCHAR", "Class it counts for."),
        ("answer", "VARCHAR", "The coarse class."),
        ("where", "VARCHAR", "Where the time passes."),
        ("doc", "VARCHAR", "What it says."),
        ("remedy", "VARCHAR", "What usually helps."),
    ),
    _cause_sql(),
)

EVENT_NAMED = View(
    "event_named",
    "Events with their payload under its own names.",
    columns(
        ("ts", "TIMESTAMP WITH TIME ZONE", "When."),
        ("t_ns", "BIGINT", "When, unix ns."),
        ("process", "INTEGER", "Process that emitted it."),
        ("kind", "VARCHAR", "Kind of that process."),
        ("engine", "VARCHAR", "Its engine id."),
        ("stage", "stage", "Which point."),
        ("request", "VARCHAR", "The request's id in that process."),
        ("payload", "MAP(VARCHAR, BIGINT)", "Numbers by name."),
        ("ref", "VARCHAR", "The text payload."),
    ),
    _event_named_sql(),
)
