"""Waits with many steps in them, in rows: a row a step, in the order in which the engine made them up."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.division import TURN_NS
from kvtrace.schema.walk import chunks, handshakes

BACKWARDS = "a step that ended before it began"
"""Why a request is declined whose wait has a step in it whose stamps cannot be right."""

_UNSEEN = "NULL::BIGINT"
_KINDS = (
    # kind, side, the one thing that all of it is charged to, condition, since, until, when its scheduler first looked
    ("wait", "prefill", "", "wp_long", "s_prefill_begun", "prefill_begun", "p_look"),
    ("wait", "decode", "", "wd_long", "s_decode_begun", "decode_begun",
     "CASE WHEN q_decode_begun <> {ready} THEN d_look END"),
    ("allocation", "decode", "", "wa_long", "s_decode_allocated", "decode_allocated", "d_look"),
    ("ride", "prefill", stages.STAGE_WAIT.name, "wr_long", "s_prefill_staged", "prefill_staged", _UNSEEN),
    ("intake", "prefill", "prefill.step_boundary", "wq_prefill_at < prefill_enqueued", "wq_prefill_at",
     "prefill_enqueued", _UNSEEN),
    ("intake", "decode", "decode.step_boundary", "wq_decode_at < decode_enqueued", "wq_decode_at",
     "decode_enqueued", _UNSEEN),
)  # fmt: skip


def listed(ready: int) -> str:
    """Return SQL for the list of a request's waits that have many steps in them, as structs."""
    structs = ", ".join(
        f"CASE WHEN {when} THEN {{'kind': '{kind}', 'side': '{side}', 'whole': nullif('{whole}', ''), "
        f"'eno': {side[0]}e, 'since': {since}, 'until': {until}, 'look': {look.format(ready=ready)}}} END"
        for kind, side, whole, when, since, until, look in _KINDS
    )
    return f"list_filter([{structs}], lambda x: x IS NOT NULL)"


def rows() -> list[tuple[str, str]]:
    """Return the CTEs up to `pieces`: (base, cause, since, until) of the parts of those waits; `blocked`: why not."""
    by = "PARTITION BY base, kind, side"
    return [
        *chunks.rows(),
        ("lw", "SELECT base, unnest(longs, recursive := true) FROM o WHERE len(longs) > 0 AND reason IS NULL"),
        ("l0", f"""SELECT w.*, coalesce(m.place, 0) AS p0, CASE WHEN m.over > since THEN least(m.over, until)
      WHEN m.b1_over > since THEN least(m.b1_over, until) ELSE since END AS at0,
    CASE WHEN m.over > since THEN m.turn WHEN m.b1_over > since THEN m.b1_turn
      WHEN kind = 'intake' THEN coalesce(m.turn, {TURN_NS}) ELSE {TURN_NS} END AS turn0
  FROM lw AS w ASOF LEFT JOIN made AS m ON m.eno = w.eno AND m.sched <= w.since"""),
        ("l1", """SELECT w.*, unnest(range(p0 + 1, coalesce(m.place, 0) + 1)) AS place
  FROM l0 AS w ASOF LEFT JOIN made AS m ON m.eno = w.eno AND m.sched < w.until"""),
        ("l2", f"""SELECT *, coalesce(whole, side || CASE WHEN tokens = 0 THEN '.capacity' ELSE '.queue' END) AS cause
  FROM (SELECT l.base, l.kind, l.side, l.whole, l.until, l.look, m.sched, m.tokens, m.turn, l.place,
      least(m.over, l.until) AS stop,
      greatest(at0, max(least(m.over, l.until)) OVER ({by} ORDER BY l.place
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS free, turn0
    FROM l1 AS l JOIN made AS m ON m.eno = l.eno AND m.place = l.place) WHERE stop > free"""),
        ("l3", f"""SELECT *, greatest(free, sched) AS begun,
    least(greatest(free, sched), free + coalesce(lag(turn) OVER w, turn0)) AS known,
    lag(cause) OVER w AS earlier FROM l2 WINDOW w AS ({by} ORDER BY place)"""),
        ("l4", """SELECT l0.*, coalesce(l.stop, at0) AS last, coalesce(l.turn, turn0) AS last_turn,
    l.cause AS last_cause
  FROM l0 LEFT JOIN (SELECT base, kind, side, max(stop) AS stop, arg_max(turn, place) AS turn,
      arg_max(cause, place) AS cause FROM l2 GROUP BY base, kind, side) AS l USING (base, kind, side)"""),
        ("pieces", """SELECT base, look, until, p.cause AS cause, p.since AS since, p.until AS stop FROM (
    SELECT base, look, until, unnest([
      {'cause': coalesce(whole, CASE WHEN earlier IS NULL THEN side || '.step_boundary' ELSE cause END),
        'since': free, 'until': known}, {'cause': 'unattributed', 'since': known, 'until': begun},
      {'cause': cause, 'since': begun, 'until': stop}]) AS p FROM l3
    UNION ALL SELECT base, look, until, unnest([
      {'cause': coalesce(whole, side || '.step_boundary'), 'since': since, 'until': at0},
      {'cause': coalesce(whole, CASE WHEN last_cause = side || '.queue' THEN last_cause
          ELSE side || '.step_boundary' END), 'since': last, 'until': least(until, last + last_turn)},
      {'cause': 'unattributed', 'since': least(until, last + last_turn), 'until': until}]) AS p FROM l4
    UNION ALL SELECT base, NULL, NULL, p FROM chunk_pieces)
  WHERE p.since < p.until"""),
        ("blocked", f"""SELECT base, min(why) AS why FROM (
      SELECT base, 'blocks' AS why FROM l2 WHERE look <= sched
      UNION ALL SELECT base, 'blocks' FROM pieces WHERE cause = 'unattributed' AND look < until
      UNION ALL SELECT base, '{BACKWARDS}' FROM l2 WHERE stop < sched
      UNION ALL SELECT base, '{chunks.SCATTERED}' FROM scattered)
    GROUP BY base"""),
    ]  # fmt: skip


def senders() -> list[tuple[str, str]]:
    """Return the CTEs up to `covered`: (base, cause, since, until) of waits in which something goes on now and then.

    A sender thread is awake, or a worker shakes hands: that has one cause, what is between has another.
    """
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
        *handshakes.rows(),
        ("waiting", f"""SELECT wait, base, since, until, '{busy}' AS inside, '{wake}' AS outside FROM s0
  UNION ALL SELECT wait, base, since, until, '{stages.HANDSHAKE.name}', '{stages.PREPARE.name}' FROM k0"""),
        ("spans", """SELECT *, coalesce(max(until) OVER (PARTITION BY wait ORDER BY since, until
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
  FROM (SELECT wait, since, until FROM s2 UNION ALL FROM k2)"""),
        ("covered", """SELECT base, cause, p.since AS since, p.until AS until FROM (
    SELECT base, unnest([inside, outside]) AS cause, unnest([
        {'since': greatest(s.since, before), 'until': s.until}, {'since': greatest(w.since, before), 'until': s.since}
      ]) AS p FROM spans AS s JOIN waiting AS w USING (wait)
    UNION ALL SELECT base, outside, {'since': greatest(since, coalesce(over, 0)), 'until': until} FROM waiting
      LEFT JOIN (SELECT wait, max(until) AS over FROM spans GROUP BY wait) USING (wait))
  WHERE p.since < p.until"""),
    ]  # fmt: skip
