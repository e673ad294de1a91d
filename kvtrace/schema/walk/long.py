"""Waits with many steps in them, in rows: a row a step, in the order in which the engine made them up."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.division import TURN_NS

BACKWARDS = "a step that ended before it began"
"""Why a request is declined whose wait has a step in it whose stamps cannot be right."""

_KINDS = (
    # kind, condition, engine, since, until, when its scheduler first looked
    ("prefill", "wp_long", "pe", "s_prefill_begun", "prefill_begun", "p_look"),
    ("decode", "wd_long", "de", "s_decode_begun", "decode_begun",
     "CASE WHEN q_decode_begun <> {ready} THEN d_look END"),
    ("allocation", "wa_long", "de", "s_decode_allocated", "decode_allocated", "d_look"),
    ("ride", "wr_long", "pe", "s_prefill_staged", "prefill_staged", "NULL::BIGINT"),
)  # fmt: skip


def listed(ready: int) -> str:
    """Return SQL for the list of a request's waits that have many steps in them, as structs."""
    structs = ", ".join(
        f"CASE WHEN {when} THEN {{'kind': '{kind}', 'eno': {eno}, 'since': {since}, 'until': {until}, "
        f"'look': {look.format(ready=ready)}}} END"
        for kind, when, eno, since, until, look in _KINDS
    )
    return f"list_filter([{structs}], lambda x: x IS NOT NULL)"


def rows() -> list[tuple[str, str]]:
    """Return the CTEs up to `pieces`: (base, cause, since, until) of the parts of those waits; `blocked`: why not."""
    wait = stages.STAGE_WAIT.name
    return [
        ("lw", "SELECT base, l.kind AS kind, l.eno AS eno, l.since AS since, l.until AS until, l.look AS look, "
         "CASE WHEN l.kind = 'prefill' OR l.kind = 'ride' THEN 'prefill' ELSE 'decode' END AS side "
         "FROM (SELECT base, unnest(longs) AS l FROM o WHERE len(longs) > 0 AND reason IS NULL)"),
        ("l0", f"""SELECT w.*, coalesce(m.place, 0) AS p0, CASE WHEN m.over > since THEN least(m.over, until)
      WHEN m.b1_over > since THEN least(m.b1_over, until) ELSE since END AS at0,
    CASE WHEN m.over > since THEN m.turn WHEN m.b1_over > since THEN m.b1_turn ELSE {TURN_NS} END AS turn0
  FROM lw AS w ASOF LEFT JOIN made AS m ON m.eno = w.eno AND m.sched <= w.since"""),
        ("l1", """SELECT w.*, unnest(range(p0 + 1, coalesce(m.place, 0) + 1)) AS place
  FROM l0 AS w ASOF LEFT JOIN made AS m ON m.eno = w.eno AND m.sched < w.until"""),
        ("l2", f"""SELECT *,
    CASE WHEN kind = 'ride' THEN '{wait}' WHEN tokens = 0 THEN side || '.capacity' ELSE side || '.queue' END AS cause
  FROM (SELECT l.base, l.kind, l.side, l.until, l.look, m.sched, m.tokens, m.turn, l.place,
      least(m.over, l.until) AS stop,
      greatest(at0, max(least(m.over, l.until)) OVER (PARTITION BY base, kind ORDER BY l.place
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS free, turn0
    FROM l1 AS l JOIN made AS m ON m.eno = l.eno AND m.place = l.place) WHERE stop > free"""),
        ("l3", """SELECT *, greatest(free, sched) AS begun,
    least(greatest(free, sched), free + coalesce(lag(turn) OVER w, turn0)) AS known,
    lag(cause) OVER w AS earlier FROM l2 WINDOW w AS (PARTITION BY base, kind ORDER BY place)"""),
        ("l4", """SELECT l0.*, coalesce(l.stop, at0) AS last, coalesce(l.turn, turn0) AS last_turn,
    l.cause AS last_cause
  FROM l0 LEFT JOIN (SELECT base, kind, max(stop) AS stop, arg_max(turn, place) AS turn, arg_max(cause, place) AS cause
    FROM l2 GROUP BY base, kind) AS l USING (base, kind)"""),
        ("pieces", f"""SELECT base, kind, look, until, p.cause AS cause, p.since AS since, p.until AS stop FROM (
    SELECT base, kind, look, until, unnest([
      {{'cause': CASE WHEN kind = 'ride' THEN '{wait}' WHEN earlier IS NULL THEN side || '.step_boundary'
          ELSE cause END,
        'since': free, 'until': known}}, {{'cause': 'unattributed', 'since': known, 'until': begun}},
      {{'cause': cause, 'since': begun, 'until': stop}}]) AS p FROM l3
    UNION ALL SELECT base, kind, look, until, unnest([
      {{'cause': CASE WHEN kind = 'ride' THEN '{wait}' ELSE side || '.step_boundary' END,
        'since': since, 'until': at0}},
      {{'cause': CASE WHEN kind = 'ride' THEN '{wait}' WHEN last_cause = side || '.queue' THEN last_cause
          ELSE side || '.step_boundary' END, 'since': last, 'until': least(until, last + last_turn)}},
      {{'cause': 'unattributed', 'since': least(until, last + last_turn), 'until': until}}]) AS p FROM l4)
  WHERE p.since < p.until"""),
        ("blocked", f"""SELECT base, min(why) AS why FROM (
      SELECT base, 'blocks' AS why FROM l2 WHERE kind <> 'ride' AND look <= sched
      UNION ALL SELECT base, 'blocks' FROM pieces WHERE kind <> 'ride' AND cause = 'unattributed' AND look < until
      UNION ALL SELECT base, '{BACKWARDS}' FROM l2 WHERE stop < sched)
    GROUP BY base"""),
    ]  # fmt: skip


def senders() -> list[tuple[str, str]]:
    """Return the CTEs up to `asleep`: (base, cause, since, until) of every wait for a sender thread."""
    wake, busy = stages.WRITER_WAKE.name, stages.WRITER_BUSY.name
    return [
        ("s0", """SELECT w.base, w.wait, w.since, w.until, w.process, w.eno, coalesce(a.place, 1) AS p0 FROM (
      SELECT base, sender AS process, pe AS eno, w.since AS since, w.until AS until, row_number() OVER () AS wait
      FROM (SELECT base, sender, pe, unnest(waits) AS w FROM o)) AS w
    ASOF LEFT JOIN awake AS a ON a.process = w.process AND a.since <= w.since"""),
        ("s1", """SELECT w.*, unnest(range(p0, coalesce(a.place, 0) + 1)) AS place FROM s0 AS w
    ASOF LEFT JOIN awake AS a ON a.process = w.process AND a.since < w.until"""),
        ("s2", """SELECT w.base, w.wait, greatest(w.since, a.since) AS since, least(w.until, a.until) AS until
  FROM s1 AS w JOIN awake AS a ON a.process = w.process AND a.eno = w.eno AND a.place = w.place
  WHERE a.until > w.since AND a.since < w.until"""),
        ("asleep", f"""SELECT base, '{busy}' AS cause, since, until FROM s2
  UNION ALL SELECT base, '{wake}', coalesce(before, w_since), since FROM (SELECT s2.base, s2.since, w.since AS w_since,
      lag(s2.until) OVER (PARTITION BY s2.wait ORDER BY s2.since) AS before FROM s2 JOIN s0 AS w USING (wait))
    WHERE coalesce(before, w_since) < since
  UNION ALL SELECT base, '{wake}', coalesce(busy_until, since), until FROM s0
    LEFT JOIN (SELECT wait, max(until) AS busy_until FROM s2 GROUP BY wait) USING (wait)
    WHERE coalesce(busy_until, since) < until"""),
    ]  # fmt: skip
