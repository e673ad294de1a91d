"""What the requests of a pair of engines share, in SQL: its fastest transfers, its least message times, its handshakes.

Requests that SQL cannot read for sure have a part in that too: `unsure` says how far theirs could change it.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

# Later than anything recorded, and twice as much is still a BIGINT.
NEVER_NS = 4_000_000_000_000_000_000

# Of such a request it is not even known whose engines they were.
_APART = "'imported points', 'ids that lead to other requests', 'engines that are both sides'"


def surroundings() -> list[tuple[str, str]]:
    """Return what requests share: pairs' fastest transfers and least message times, and what is not sure about them."""
    return [
        (
            "awake",
            f"""SELECT process, eno, t_ns AS since, coalesce(slept, {NEVER_NS}) AS until,
    row_number() OVER (PARTITION BY process ORDER BY t_ns) AS place
  FROM (SELECT process, eno, t_ns, stage, lead(stage) OVER w AS after, lead(t_ns) OVER w AS slept
    FROM event JOIN proc USING (process) WHERE stage IN ('sender.woke', 'sender.slept')
    WINDOW w AS (PARTITION BY process ORDER BY t_ns, stage::VARCHAR))
  WHERE stage = 'sender.woke' AND (after IS NULL OR after = 'sender.slept')""",
        ),
        (
            "known",
            f"SELECT * FROM r WHERE why IS NULL OR why NOT IN ({_APART}, 'several legs', 'several transfers')",
        ),
        (
            "fast",
            """SELECT pe, de, x_size, min(greatest(0, seen_ns - x_started_mx)) AS fastest FROM known
  WHERE has_x AND seen_ns IS NOT NULL GROUP BY pe, de, x_size""",
        ),
        (
            "messages",
            """SELECT m.pe, m.de, min(greatest(0, m.received_mx - m.d_sent)) AS least
  FROM (SELECT pe, de, received_mx, d_sent, d_reader AS process FROM known
    WHERE d_sent IS NOT NULL AND received_mx IS NOT NULL) AS m
    ASOF LEFT JOIN awake AS a ON a.process = m.process AND a.since <= m.received_mx
  WHERE a.since IS NULL OR a.since <= m.d_sent GROUP BY m.pe, m.de""",
        ),
        (
            "unsure",
            f"""SELECT pe, de, anywhere, min(fast_low) AS fast_low, min(message_low) AS message_low FROM (SELECT
      unnest([pe, pe, 0]) AS pe, unnest([de, 0, de]) AS de,
      why IN ({_APART}) AS anywhere,
      CASE WHEN p_x_started_mx IS NOT NULL OR d_x_started_mx IS NOT NULL THEN
        CASE WHEN p_x_probed IS NOT NULL OR d_x_probed IS NOT NULL THEN 0 ELSE
        least(p_x_done_mn, d_x_done_mn, p_x_ended_mn, d_x_ended_mn, p_told_mn, d_told_mn)
          - greatest(p_x_started_mx, d_x_started_mx) END END AS fast_low,
      d_received_mn - d_sent AS message_low
    FROM r ANTI JOIN known USING (base)) GROUP BY pe, de, anywhere""",
        ),
        (
            "meetings",
            f"""SELECT eno, "ref" AS peer, min(since) AS since, max(until) AS until FROM (SELECT p.eno, "ref", process,
      min(t_ns) AS since, CASE WHEN max(t_ns) FILTER (stage = 'handshake.started')
        >= coalesce(max(t_ns) FILTER (stage = 'handshake.ended'), 0) THEN {NEVER_NS} ELSE max(t_ns) END AS until
    FROM event JOIN proc AS p USING (process) WHERE stage IN ('handshake.started', 'handshake.ended')
    GROUP BY p.eno, "ref", process) GROUP BY ALL""",
        ),
    ]
