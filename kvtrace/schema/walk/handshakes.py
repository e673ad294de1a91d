"""Handshakes while a transfer is prepared, in rows. The reference is `division.divide_by_handshake`.

Both sides of that are coordination, so that only the parts of a path (`walk_segment`) have to know.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.walk.aggregates import among, when
from kvtrace.schema.walk.pairs import NEVER_NS
from kvtrace.schema.walk.parts import waits


def seen() -> list[tuple[str, str]]:
    """Return the CTEs `hands` (an engine's handshakes with other engines, by number) and `met` (when a pair's were)."""
    order = 'PARTITION BY process, "ref" ORDER BY t_ns, stage::VARCHAR'
    begun, ended = stages.HANDSHAKE_STARTED, stages.HANDSHAKE_ENDED
    return [
        (
            "hands",
            f"""SELECT h.eno, process, coalesce(n.eno, -1) AS peer, since, until FROM (
      SELECT p.eno, process, "ref", t_ns AS since, stage, lag(stage) OVER ({order}) AS before,
        coalesce(min({when("t_ns", ended)}) OVER ({order} ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING),
          {NEVER_NS}) AS until
      FROM event JOIN proc AS p USING (process) WHERE {among(begun, ended)}) AS h
    LEFT JOIN (SELECT eno, engine FROM naming UNION SELECT 0, '') AS n ON n.engine = h."ref"
  WHERE {among(begun)} AND before IS DISTINCT FROM stage""",
        ),
        (
            "met",
            """SELECT pe, de, min(since) AS since, max(until) AS until, min(CASE WHEN by_d THEN since END) AS d_since,
    max(CASE WHEN by_d THEN until END) AS d_until FROM (
      SELECT unnest([eno, peer]) AS pe, unnest([peer, eno]) AS de, unnest([false, true]) AS by_d, since, until
      FROM hands)
  GROUP BY pe, de""",
        ),
    ]


def columns() -> str:
    """Return SQL for the columns h_since and h_until: when, on the path, a transfer was being prepared."""
    prepared = waits(stages.PREPARED, stages.MATCHED, stages.LOAD_STARTED)
    unloaded = waits(stages.LOAD_FAILED, stages.LOAD_STARTED)
    return ", ".join(
        f"CASE WHEN {prepared} THEN {way}transfer_prepared WHEN {unloaded} THEN {way}decode_load_failed END AS {name}"
        for way, name in (("s_", "h_since"), ("", "h_until"))
    )


def rows() -> list[tuple[str, str]]:
    """Return the CTEs `k0` (stretches with perhaps a handshake in them) and `k2` (since, until of those handshakes)."""
    own = "h.peer = k.peer AND (NOT has_x OR h.process IN (0, sender))"
    meanwhile = "h.until > k.since AND h.since < k.until"
    return [
        ("k0", """SELECT base, -row_number() OVER () AS wait, h_since AS since, h_until AS until, has_x, sender,
    CASE WHEN mode = 'pull' THEN de ELSE pe END AS eno, CASE WHEN mode = 'pull' THEN pe ELSE de END AS peer
  FROM o WHERE shaking"""),
        ("k1", f"""SELECT wait, first(h.process ORDER BY h.since, h.until, h.process) AS worker, min(h.since) AS begun
  FROM k0 AS k JOIN hands AS h ON h.eno = k.eno AND {own} AND {meanwhile} GROUP BY wait"""),
        ("k2", f"""SELECT wait, greatest(h.since, k.since) AS since, least(h.until, k.until) AS until
  FROM k0 AS k JOIN k1 USING (wait) JOIN hands AS h ON h.eno = k.eno AND {meanwhile}
    AND ({own} OR (h.peer <> k.peer AND h.process = worker AND h.since < begun))"""),
    ]  # fmt: skip
