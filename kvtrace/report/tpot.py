"""Numbers about the tokens after the first, computed by DuckDB: times per token by mode, and who cost others most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrace.store import Store

Row = dict[str, Any]

BLAMED_SHOWN = 5

_TPOT_SQL = """
SELECT mode, count(*) AS requests, sum(tokens)::BIGINT AS tokens,
  quantile_cont(tpot_ns, [0.5, 0.9, 0.99]) AS tpot_ns, max(itl_max_ns) AS itl_max_ns,
  sum(decode_ns)::BIGINT AS decode_ns, sum(extension_ns)::BIGINT AS extension_ns,
  sum(occupancy_ns)::BIGINT AS occupancy_ns, sum(by_others_ns)::BIGINT AS by_others_ns,
  sum(mixed_ns)::BIGINT AS mixed_ns, sum(unattributed_ns)::BIGINT AS unattributed_ns
FROM tpot WHERE tpot_ns IS NOT NULL GROUP BY mode ORDER BY mode
"""

_BLAMED_SQL = """
SELECT request_id, mode, moved_bytes, descriptors, victims, extension_ns
FROM blamed ORDER BY extension_ns DESC, request_id LIMIT $count
"""


def summary(store: Store) -> Row:
    """Return the population's times per token by mode, and the requests whose transfers cost others most. In ns."""
    groups = []
    for row in store.rows(_TPOT_SQL, {}):
        names = ("p50", "p90", "p99")
        quantiles = {name: round(value) for name, value in zip(names, row["tpot_ns"], strict=True)}
        groups.append({**row, "tpot_ns": quantiles})
    return {"groups": groups, "blamed": store.rows(_BLAMED_SQL, {"count": BLAMED_SHOWN})}
