"""Arrivals against completions: whether a run kept up with what was asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrace import verdict

if TYPE_CHECKING:
    from kvtrace.store import Store

LEAST_REQUESTS = 20
# Served below this part of offered, waiting grows with time, whatever the system: no class then names a remedy.
SATURATED_BELOW = 0.95

_SQL = """
WITH asked AS (
  SELECT *, ttft_ns IS NOT NULL AND NOT list_contains($cut, verdict::VARCHAR) AS served FROM request
)
SELECT count(*) AS arrived, max(start_ns) - min(start_ns) AS arriving_ns,
  count(*) FILTER (served) AS served, max(end_ns) FILTER (served) - min(end_ns) FILTER (served) AS serving_ns,
  count(*) FILTER (NOT served AND ttft_ns IS NULL AND verdict = $incomplete
    AND start_ns > (SELECT max(start_ns) FROM asked WHERE served)) AS waiting
FROM asked
"""


def rates(store: Store) -> dict[str, Any] | None:
    """Return arrivals and completions per second and whether the run was saturated; None with too few requests.

    Served is what had a first token and was neither aborted nor failed. What came behind all of that and has no end
    waits, where the recording goes on or was cut short; the rest asks for no answer any more. Both rates are counted
    alike, over the time from the first to the last arrival or completion, so that a run that keeps up shows equal ones.
    """
    row = store.rows(_SQL, {"cut": [verdict.ABORTED, verdict.FAILED], "incomplete": verdict.INCOMPLETE})[0]
    if row["served"] < LEAST_REQUESTS or not row["arriving_ns"] or not row["serving_ns"]:
        return None
    offered_rate_hz = (row["arrived"] - 1) / (row["arriving_ns"] / 1e9)
    served_rate_hz = (row["served"] - 1) / (row["serving_ns"] / 1e9)
    asking_share = (row["served"] + row["waiting"]) / row["arrived"]
    return {
        "offered_rate_hz": round(offered_rate_hz, 3),
        "served_rate_hz": round(served_rate_hz, 3),
        "saturated": served_rate_hz < SATURATED_BELOW * offered_rate_hz * asking_share,
    }
