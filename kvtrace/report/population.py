"""Numbers about many requests, computed by DuckDB. Different scopes and modes are never mixed: each pair is a group.

Percentiles are quantiles of TTFT over the group's requests that have a first token. A share at a percentile is
the class's time over the TTFT, summed over the requests whose TTFT ranks around that percentile (`AROUND`), so
the shares at a percentile add up to the whole.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvtrace.findings import checks, gather, rates, terms
from kvtrace.messages import command_line
from kvtrace.report import tpot
from kvtrace.schema import median_ns
from kvtrace.stages import HANDSHAKE
from kvtrace.verdict import UNDER_WAY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrace.findings.model import Finding
    from kvtrace.store import Store

Row = dict[str, Any]

# Percentile name, quantile, and how far from it (in quantiles of rank) a request still counts as around it.
AROUND: tuple[tuple[str, float, float], ...] = (("p50", 0.50, 0.05), ("p90", 0.90, 0.05), ("p99", 0.99, 0.01))
CLASSES: Mapping[str, str] = {
    "compute.run": "compute_run_ns",
    "compute.queue": "compute_queue_ns",
    "coordination": "coordination_ns",
    "transfer": "transfer_ns",
    "unattributed": "unattributed_ns",
}
WORST_REQUESTS = 5

_VERDICTS_SQL = """
SELECT scope, mode, CASE WHEN seen_ns IS NULL THEN verdict ELSE $under_way END AS verdict,
  count(*) AS requests, count(ttft_ns) AS timed
FROM request LEFT JOIN under_way USING (request_key) GROUP BY ALL ORDER BY scope, mode, requests DESC, verdict
"""

_PERCENTILES_SQL = """
SELECT scope, mode, quantile_cont(ttft_ns, [0.5, 0.9, 0.99]) AS ttft_ns
FROM request WHERE ttft_ns IS NOT NULL GROUP BY ALL
"""

_SHARES_SQL = """
WITH ranked AS (
  SELECT *,
    row_number() OVER (PARTITION BY scope, mode ORDER BY ttft_ns, request_key) - 1 AS rank,
    count(*) OVER (PARTITION BY scope, mode) - 1 AS last_rank
  FROM request WHERE ttft_ns IS NOT NULL
)
SELECT scope, mode, count(*) AS requests,
  sum(ttft_ns)::BIGINT AS ttft_ns,
  sum(compute_run_ns)::BIGINT AS compute_run_ns,
  sum(compute_queue_ns)::BIGINT AS compute_queue_ns,
  sum(coordination_ns)::BIGINT AS coordination_ns,
  sum(transfer_ns)::BIGINT AS transfer_ns,
  sum(unattributed_ns)::BIGINT AS unattributed_ns,
  sum(coalesce(transfer_low_ns, transfer_ns))::BIGINT AS transfer_low_ns,
  sum(coalesce(transfer_high_ns, transfer_ns))::BIGINT AS transfer_high_ns
FROM ranked
WHERE rank BETWEEN floor(round(greatest($low, 0) * last_rank, 6)) AND ceil(round(least($high, 1) * last_rank, 6))
GROUP BY ALL
"""

_CAUSES_SQL = f"""
WITH per_request AS (
  SELECT scope, mode, request_key, cause, segment.class AS class, sum(segment.end_ns - segment.start_ns) AS duration_ns
  FROM segment JOIN request USING (request_key)
  WHERE ttft_ns IS NOT NULL
  GROUP BY ALL HAVING duration_ns > 0
), total AS (
  SELECT scope, mode, sum(ttft_ns) AS ttft_ns FROM request WHERE ttft_ns IS NOT NULL GROUP BY ALL
)
SELECT scope, mode, cause, class,
  sum(duration_ns)::BIGINT AS total_ns,
  {median_ns("duration_ns")} AS median_ns,
  (sum(duration_ns) / any_value(total.ttft_ns))::DOUBLE AS share,
  count(*) AS requests
FROM per_request JOIN total USING (scope, mode)
GROUP BY ALL ORDER BY scope, mode, total_ns DESC, cause
"""

# The first contact of a pair comes once: what the requests that paid for it took, and the percentiles of the others.
_CONTACT_SQL = """
WITH paid AS (
  SELECT request_key, sum(end_ns - start_ns)::BIGINT AS paid_ns FROM segment WHERE cause = $handshake
  GROUP BY request_key HAVING paid_ns > 0
)
SELECT scope, mode, count(paid_ns) AS requests, max(paid_ns) AS longest_ns,
  quantile_cont(ttft_ns, [0.5, 0.9, 0.99]) FILTER (paid_ns IS NULL) AS others_ttft_ns
FROM request LEFT JOIN paid USING (request_key) WHERE ttft_ns IS NOT NULL
GROUP BY ALL HAVING count(paid_ns) BETWEEN 1 AND count(*) - 1
"""

_HIDDEN_SQL = f"""
WITH per_request AS (
  SELECT scope, mode, request_key, cause, hidden.class AS class,
    sum(duration_ns) AS duration_ns, min(slack_ns) AS slack_ns
  FROM hidden JOIN request USING (request_key)
  GROUP BY ALL
)
SELECT scope, mode, cause, class,
  sum(duration_ns)::BIGINT AS total_ns,
  {median_ns("duration_ns")} AS median_ns,
  min(slack_ns)::BIGINT AS least_slack_ns,
  count(*) AS requests
FROM per_request GROUP BY ALL ORDER BY scope, mode, total_ns DESC, cause
"""

_WORST_SQL = """
WITH causes AS (
  SELECT request_key, cause, sum(end_ns - start_ns) AS cause_ns
  FROM segment WHERE class <> 'compute.run' GROUP BY ALL
), longest AS (
  SELECT request_key, arg_max(cause, cause_ns) AS longest_wait, max(cause_ns)::BIGINT AS longest_wait_ns
  FROM causes GROUP BY ALL
)
SELECT scope, mode, request_id, client_request_id, verdict, ttft_ns, compute_ns, coordination_ns, transfer_ns,
  transfer_low_ns, transfer_high_ns, unattributed_ns, longest_wait, longest_wait_ns
FROM request LEFT JOIN longest USING (request_key)
WHERE ttft_ns IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY scope, mode ORDER BY ttft_ns DESC, request_key) <= $count
ORDER BY scope, mode, ttft_ns DESC, request_key
"""


def summary(store: Store, facts: Mapping[str, str]) -> Row:
    """Return the population's numbers, ready for JSON: per group percentiles, shares, causes, hidden work, worst."""
    verdicts = _grouped(store.rows(_VERDICTS_SQL, {"under_way": UNDER_WAY}))
    percentiles = _grouped(store.rows(_PERCENTILES_SQL, {}))
    causes = _grouped(store.rows(_CAUSES_SQL, {}))
    hidden = _grouped(store.rows(_HIDDEN_SQL, {}))
    contacts = _grouped(store.rows(_CONTACT_SQL, {"handshake": HANDSHAKE.name}))
    worst = _grouped(store.rows(_WORST_SQL, {"count": WORST_REQUESTS}))
    shares = {
        name: _grouped(store.rows(_SHARES_SQL, {"low": quantile - half, "high": quantile + half}))
        for name, quantile, half in AROUND
    }
    groups = []
    for (scope, mode), counts in verdicts.items():
        group = (scope, mode)
        quantiles = percentiles[group][0]["ttft_ns"] if group in percentiles else [None] * len(AROUND)
        groups.append(
            {
                "scope": scope,
                "mode": mode,
                "requests": sum(row["requests"] for row in counts),
                "with_first_token": sum(row["timed"] for row in counts),
                "verdicts": {row["verdict"]: row["requests"] for row in counts},
                "ttft_ns": _percentiles(quantiles),
                "shares": {name: _shares(shares[name].get(group)) for name, _, _ in AROUND},
                "transfer_bounds": {name: _bounds(shares[name].get(group)) for name, _, _ in AROUND},
                "first_contact": _first_contact(contacts.get(group)),
                "causes": causes.get(group, []),
                "hidden": hidden.get(group, []),
                "worst": worst.get(group, []),
            }
        )
    groups.sort(key=lambda group: (-group["with_first_token"], -group["requests"]))
    kept_up = load(store, facts)
    found = [_finding(store, one) for one in checks.findings(gather.gather(store, kept_up))]
    return {
        "requests": sum(group["requests"] for group in groups),
        "groups": groups,
        "pace": tpot.summary(store),
        "load": kept_up,
        "findings": found,
        "findings_basis": basis(groups),
    }


def basis(groups: Sequence[Row]) -> Row:
    """Return over which requests findings about waiting can be: those of groups that are large enough, and how many.

    `groups` are those of `summary`; `largest_group` counts the requests with a first token of the largest.
    """
    timed = [group["with_first_token"] for group in groups]
    return {
        "requests": sum(group["requests"] for group in groups),
        "judged_requests": sum(
            group["requests"] for group in groups if group["with_first_token"] >= terms.LEAST_REQUESTS
        ),
        "largest_group": max(timed, default=0),
        "least_requests": terms.LEAST_REQUESTS,
    }


def _finding(store: Store, finding: Finding) -> Row:
    """Return a finding with the commands that show more: its query, and the request that shows it most."""
    example = next((name for name in finding.examples if name and "\0" not in name), None)
    dashes = ["--"] if example is not None and example.startswith("-") else []
    return {
        **asdict(finding),
        "command": command_line("sql", store.path, finding.query),
        "example_command": command_line("explain", store.path, *dashes, example) if example is not None else None,
    }


def load(store: Store, facts: Mapping[str, str]) -> Row | None:
    """Return what `rates` says of the run, None with too few requests.

    `stated_rate_hz` is what the load generator was told, where the run says it.
    """
    found = rates.rates(store)
    return None if found is None else {"stated_rate_hz": _stated_rate_hz(facts.get("workload", "")), **found}


def _grouped(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return rows by (scope, mode), those two columns taken off; rows of a group must come together."""
    ordered = groupby(rows, key=lambda row: (row["scope"], row["mode"]))
    return {
        group: [{name: value for name, value in row.items() if name not in ("scope", "mode")} for row in members]
        for group, members in ordered
    }


def _shares(rows: list[Row] | None) -> Row | None:
    """Return each class's part of the TTFT (0 to 1) around one percentile, and how many requests that is."""
    if not rows:
        return None
    row = rows[0]
    whole = row["ttft_ns"]
    parts = {kind: row[column] / whole if whole else 0.0 for kind, column in CLASSES.items()}
    return {"requests": row["requests"], **parts}


def _bounds(rows: list[Row] | None) -> Row | None:
    """Return the least and the most part of the TTFT around one percentile that was transfer (0 to 1)."""
    if not rows:
        return None
    row = rows[0]
    whole = row["ttft_ns"]
    return {name: row[f"transfer_{name}_ns"] / whole if whole else 0.0 for name in ("low", "high")}


def _percentiles(quantiles: Sequence[float | None]) -> Row:
    """Return quantiles in ns by the names of `AROUND`, None for those of no request."""
    return {
        name: None if value is None else round(value) for (name, _, _), value in zip(AROUND, quantiles, strict=True)
    }


def _first_contact(rows: list[Row] | None) -> Row | None:
    """Return how many requests waited in a handshake, for how long at most, and the percentiles of the others."""
    if not rows:
        return None
    row = rows[0]
    return {
        "requests": row["requests"],
        "longest_ns": row["longest_ns"],
        "others_ttft_ns": _percentiles(row["others_ttft_ns"]),
    }


def _stated_rate_hz(workload: str) -> float | None:
    """Return the arrivals per second that the lab's load was told to make; None of any other workload."""
    try:
        rate = json.loads(workload).get("rate_qps")
    except (ValueError, AttributeError, RecursionError):
        return None
    return float(rate) if isinstance(rate, int | float) and math.isfinite(rate) else None
