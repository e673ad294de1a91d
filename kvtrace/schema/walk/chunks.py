"""Requests that several steps of an engine worked on, in rows: a row a step. The reference is `own_steps`."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.division import TURN_NS
from kvtrace.schema.walk.aggregates import among
from kvtrace.schema.walk.plan import NUMBER

SCATTERED = "several steps of its own that do not follow each other"
"""Why a request is declined of whose steps one is missing, or with another's between them, or which overlap."""

_SIDES = (
    ("prefill", stages.PREFILL_BEGUN, stages.PREFILL_COMPUTED),
    ("decode", stages.DECODE_BEGUN, stages.DECODE_COMPUTED),
)


def listed() -> str:
    """Return SQL for the list of sides on which several steps worked on a request, with its stretch of the path."""
    structs = ", ".join(
        f"CASE WHEN {side[0]}_chunked THEN {{'side': '{side}', 'eno': {side[0]}e, 'id': {side[0]}_id, "
        f"'since': CASE WHEN q_{side}_computed = {NUMBER[begun.name]} THEN s_{side}_computed END, "
        f"'until': {side}_computed}} END"
        for side, begun, _ in _SIDES
    )
    return f"CASE WHEN p_chunked OR d_chunked THEN list_filter([{structs}], lambda x: x IS NOT NULL) END"


def rows() -> list[tuple[str, str]]:
    """Return the CTEs up to `chunk_pieces`: (base, p) of the parts of those steps, which follow each other.

    `own1` are the steps, `scattered` the requests of which that is not so. A step's stretch begins when all of the one
    before it is over (`free`). One whose connector outlasts its forward would push those after it: that is declined.
    """
    scheduled = stages.PREFILL_SCHEDULED, stages.DECODE_SCHEDULED
    by = "WINDOW w AS (PARTITION BY base, side ORDER BY t_ns, a)"
    turned = f"least(greatest(free, least(sched, until)), free + {TURN_NS})"
    lacked = "greatest(0, lacked_r - greatest(0, over - tailed))"
    connector, lacking = stages.STEP_CONNECTOR.name, stages.PROCESSOR_WAIT.name
    stretches = ", ".join(
        f"{{'cause': {cause}, 'since': {since}, 'until': {until}}}"
        for cause, since, until in (
            ("side || '.others'", "free", "turned"), ("'unattributed'", "turned", "least(sched, until)"),
            ("side || '.launch'", "greatest(free, sched)", "launched"), (f"'{connector}'", "launched", "began"),
            ("run", "began", "run_until"), (f"'{lacking}'", "run_until", "ran"),
            ("side || '.sample'", "ran", "connecting"), (f"'{connector}'", "connecting", "connector_until"),
            (f"'{lacking}'", "connector_until", "passed"), ("side || '.sample'", "passed", "sample_until"),
            (f"'{lacking}'", "sample_until", "tailed"),
        )
    )  # fmt: skip
    return [
        ("own0", "SELECT base, unnest(chunked, recursive := true) FROM o WHERE chunked IS NOT NULL AND reason IS NULL"),
        ("own1", f"""SELECT w.* EXCLUDE (id, eno), e.* EXCLUDE (id, side), m.place, m.sched, m.connected, m.over,
    greatest(m.sched, m.started) AS started, CASE WHEN m.forwarded <> 0 THEN m.forwarded ELSE m.over END AS forwarded,
    greatest(0, m.ahead) AS ahead, greatest(0, m.connector - m.ahead) AS behind, m.lacked_f, m.lacked_c, m.lacked_r
  FROM own0 AS w JOIN (SELECT hash(request) AS id, t_ns, a, b, c, d,
      CASE WHEN {among(scheduled[0])} THEN 'prefill' ELSE 'decode' END AS side FROM event
    WHERE {among(*scheduled)} AND hash(request) IN (SELECT id FROM own0)) AS e ON e.id = w.id AND e.side = w.side
  LEFT JOIN made AS m ON m.eno = w.eno AND m.step = e.a AND m.sched = e.t_ns"""),
        ("own2", f"""SELECT *, lead(sched) OVER w AS next, place IS NULL OR place <> lag(place, 1, place - 1) OVER w + 1
      OR a <= lag(a, 1, a - 1) OVER w OR d <> lag(d, 1, d) OVER w
      OR CASE WHEN side = 'prefill' THEN c >= d ELSE (c + b >= d) <> (lead(a) OVER w IS NULL) END AS odd,
    least(until, greatest(started, forwarded, least(over, lead(sched) OVER w))) AS passed_on FROM own1 {by}"""),
        ("own3", f"""SELECT *, greatest(since, max(passed_on) OVER (w ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
    AS free FROM own2 {by}"""),
        ("own4", "SELECT *, least(greatest(free, started), until) AS launched, "
         "least(launched + ahead, until) AS began, "
         "CASE WHEN next IS NULL THEN until ELSE greatest(began, least(forwarded, until)) END AS ran, "
         "CASE WHEN next IS NULL THEN ran ELSE greatest(ran, least(over, next, until)) END AS tailed FROM own3"),
        ("scattered", "SELECT base FROM own4 WHERE odd IS NOT FALSE "
         "OR (next IS NOT NULL AND ahead > 0 AND began > least(forwarded, until))"),
        ("chunk_pieces", f"""SELECT base, unnest([{stretches}]) AS p FROM (SELECT *, {turned} AS turned,
      CASE WHEN side = 'prefill' THEN '{stages.PREFILL_FORWARD.name}' WHEN c + 1 < d THEN '{stages.DECODE_PREFILL.name}'
        ELSE '{stages.FIRST_STEP.name}' END AS run, greatest(began, ran - lacked_f) AS run_until,
      least(greatest(connected, ran), tailed) AS passed,
      greatest(ran, passed - behind) AS connecting,
      greatest(connecting, passed - lacked_c) AS connector_until,
      greatest(passed, tailed - {lacked}) AS sample_until FROM own4 WHERE since IS NOT NULL)"""),
    ]  # fmt: skip
