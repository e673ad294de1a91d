"""What the requests of a pair of engines share, in SQL: its fastest transfers, its least message times, its handshakes.

Requests that SQL cannot read for sure have a part in that too: `unsure` says how far theirs could change it.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.walk.aggregates import among

# Later than anything recorded, and twice as much is still a BIGINT.
NEVER_NS = 4_000_000_000_000_000_000

# Of such a request it is not even known whose engines they were.
_APART = "'imported points', 'ids that lead to other requests', 'engines that are both sides'"
KNOWN = f"(why IS NULL OR why NOT IN ({_APART}, 'several legs'))"


def surroundings() -> list[tuple[str, str]]:
    """Return what requests share: pairs' fastest transfers and least message times, and what is not sure about them."""
    return [
        (
            "awake",
            f"""SELECT process, eno, t_ns AS since, coalesce(slept, {NEVER_NS}) AS until,
    row_number() OVER (PARTITION BY process ORDER BY t_ns) AS place
  FROM (SELECT process, eno, t_ns, stage, lead(stage) OVER w AS after, lead(t_ns) OVER w AS slept
    FROM event JOIN proc USING (process) WHERE {among(stages.SENDER_WOKE, stages.SENDER_SLEPT)}
    WINDOW w AS (PARTITION BY process ORDER BY t_ns, stage::VARCHAR))
  WHERE stage = 'sender.woke' AND (after IS NULL OR after = 'sender.slept')""",
        ),
        (
            "fast",
            f"""SELECT pe, de, x_size, min(greatest(0, seen_ns - started_ns)) AS fastest FROM (
      SELECT pe, de, x_size, seen_ns, started_ns FROM judged
      WHERE has_x AND seen_ns IS NOT NULL AND NOT several AND {KNOWN}
    UNION ALL SELECT pe, de, size, seen, started FROM signed
      WHERE seen IS NOT NULL AND started IS NOT NULL AND NOT failed)
  GROUP BY pe, de, x_size""",
        ),
        (
            "messages",
            f"""SELECT m.pe, m.de, min(greatest(0, m.received_mx - m.d_sent)) AS least
  FROM (SELECT pe, de, received_mx, d_sent, reader AS process FROM judged
    WHERE d_sent IS NOT NULL AND received_mx IS NOT NULL AND {KNOWN}) AS m
    ASOF LEFT JOIN awake AS a ON a.process = m.process AND a.since <= m.received_mx
  WHERE a.since IS NULL OR a.since <= m.d_sent GROUP BY m.pe, m.de""",
        ),
        (
            "unsure",
            f"""SELECT pe, de, anywhere, min(fast_low) AS fast_low, min(message_low) AS message_low FROM (SELECT
      unnest([pe, pe, 0]) AS pe, unnest([de, 0, de]) AS de, why IN ({_APART}) AS anywhere, fast_low, message_low
    FROM judged WHERE NOT ({KNOWN})) GROUP BY pe, de, anywhere""",
        ),
    ]
