"""Requests that have to do with others, in SQL: by their ids, and by what their engines did when they arrived."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.walk.aggregates import among
from kvtrace.schema.walk.gather import base_of


def strange() -> list[tuple[str, str]]:
    """Return the CTEs up to `strange`: requests that may have to do with others of their ids, and why that matters."""
    named = base_of("SELECT base AS mine, unnest(nameless) AS request FROM r WHERE nameless IS NOT NULL")
    return [
        ("twice", "SELECT hash(base) AS id FROM r GROUP BY ALL HAVING count(*) > 1"),
        (
            "linked",
            """SELECT base, unnest(of_p) AS other, true AS to_p FROM r WHERE of_p IS NOT NULL
  UNION ALL SELECT base, unnest(of_d), false FROM r WHERE of_d IS NOT NULL""",
        ),
        (
            "astray",
            """SELECT unnest([l.base, o.base]) AS base FROM linked AS l
    JOIN (SELECT base, p_id AS id, true AS is_p FROM r UNION ALL SELECT base, d_id, false FROM r)
      AS o ON o.id = l.other AND o.is_p = l.to_p WHERE o.base <> l.base""",
        ),
        (
            "sharing",
            """SELECT unnest(list(DISTINCT base)) AS base
    FROM (SELECT base, unnest(carried) AS other FROM r WHERE carried IS NOT NULL)
    WHERE other IS NOT NULL GROUP BY other HAVING count(DISTINCT base) > 1""",
        ),
        (
            "misnamed",
            f"""SELECT unnest([n.base, n.other]) AS base FROM (SELECT mine AS base, unnest([cut,
      CASE WHEN starts_with(whole, 'cmpl-') THEN regexp_replace(stem, '-[0-9]+$', '') END, stem]) AS other
    FROM ({named})) AS n SEMI JOIN (SELECT base FROM r WHERE has_f) AS f ON f.base = n.other""",
        ),
        (
            "asked",
            """SELECT key FROM (SELECT client AS key, base FROM r WHERE client <> ''
    UNION ALL SELECT base, base FROM r SEMI JOIN (SELECT client FROM r WHERE client <> '') AS c ON c.client = r.base
      WHERE r.client = '') GROUP BY key HAVING count(*) > 1 AND count(DISTINCT base) <= 32""",
        ),
        (
            "strange",
            """SELECT base, min(kind) AS kind FROM (
    SELECT base, 1 AS kind FROM astray UNION ALL SELECT base, 1 FROM misnamed UNION ALL SELECT base, 1 FROM sharing
    UNION ALL SELECT base, 2 FROM r SEMI JOIN twice ON twice.id = hash(r.base)
    UNION ALL SELECT base, 3 FROM r SEMI JOIN asked ON asked.key = r.client WHERE client <> ''
    UNION ALL SELECT base, 3 FROM r SEMI JOIN asked ON asked.key = r.base WHERE client = '') GROUP BY base""",
        ),
        (
            "judged",
            """SELECT r.*, CASE WHEN alone = 'imported points' THEN alone
      WHEN kind = 1 OR alone = 'ids that lead to other requests' THEN 'ids that lead to other requests'
      WHEN alone = 'engines that are both sides' THEN alone
      WHEN kind = 2 OR alone = 'several legs' THEN 'several legs'
      WHEN kind = 3 THEN 'several attempts' ELSE alone END AS why
  FROM r LEFT JOIN strange USING (base)""",
        ),
    ]


def looked() -> list[tuple[str, str]]:
    """Return the CTEs `others` and `da`: whom a scheduler looked at after an arrival, and which steps it had made up.

    `looks` are those at anybody, perhaps in vain; mostly there are none, and then nothing is sorted.
    """
    looks = " UNION ALL ".join(
        "SELECT p.eno, e.t_ns FROM event AS e JOIN proc AS p USING (process) "
        f"WHERE {among(stage)} AND hash(e.request) IN (SELECT id FROM vain WHERE side = '{side}')"
        for side, stage in (("p", stages.PREFILL_CONSIDERED), ("d", stages.DECODE_CONSIDERED))
    )
    return [
        (
            "vain",
            "SELECT unnest([p_vain, d_vain]) AS id, unnest(['p', 'd']) AS side FROM r "
            "WHERE p_vain IS NOT NULL OR d_vain IS NOT NULL",
        ),
        ("looks", looks),
        (
            "others",
            """SELECT w.eno, w.enq, v.t_ns AS look FROM (SELECT pe AS eno, prefill_enqueued AS enq FROM r
    UNION SELECT de, decode_enqueued FROM r) AS w SEMI JOIN looks USING (eno)
  ASOF JOIN looks AS v ON v.eno = w.eno AND v.t_ns >= w.enq""",
        ),
        (
            "da",
            """SELECT w.eno, w.enq, m.sched, m.over, m.turn, m.b1_over, m.b1_turn, m.a1_sched
  FROM (SELECT DISTINCT de AS eno, decode_enqueued AS enq FROM r WHERE decode_enqueued IS NOT NULL) AS w
    ASOF LEFT JOIN made AS m ON m.eno = w.eno AND m.sched <= w.enq""",
        ),
    ]
