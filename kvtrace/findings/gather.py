"""A run's facts, gathered from a store by SQL: what the checks need and nothing else."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvtrace import stages
from kvtrace.findings.model import (
    CauseFacts,
    Detection,
    Facts,
    Group,
    Held,
    Late,
    Pacing,
    Posting,
    Retried,
    Straggler,
)
from kvtrace.schema import median_ns, quantile_ns
from kvtrace.splits import AFTER_REPLY
from kvtrace.store import Store

Row = dict[str, Any]
Key = tuple[str, str]

EXAMPLES = 3
# Nanoseconds of doubt that a bracket may leave for an arrival to count as certain, as a part of the time to notice it.
_TIGHT = 0.25

_GROUPS_SQL = """
SELECT mode, scope, count(ttft_ns) AS requests, coalesce(sum(ttft_ns), 0)::BIGINT AS ttft_ns
FROM request GROUP BY ALL ORDER BY mode, scope
"""

_CAUSES_SQL = f"""
WITH per_request AS (
  SELECT r.mode, r.scope, s.cause, r.request_key, r.request_id, sum(s.end_ns - s.start_ns)::BIGINT AS cause_ns
  FROM segment AS s JOIN request AS r USING (request_key)
  WHERE r.ttft_ns IS NOT NULL GROUP BY ALL HAVING cause_ns > 0
)
SELECT mode, scope, cause AS name, count(*) AS requests, sum(cause_ns)::BIGINT AS total_ns,
  {median_ns("cause_ns")} AS median_ns, {quantile_ns("cause_ns", 0.9)} AS p90_ns,
  max_by(request_id, cause_ns, $examples) AS examples
FROM per_request GROUP BY ALL
"""

# What passes between the legs: P's reply, the dispatch of D's leg and its hop; or the answer's time until that reply.
_LEGS_SQL = f"""
WITH per_request AS (
  SELECT r.mode, r.scope, r.request_key, r.request_id, sum(s.end_ns - s.start_ns)::BIGINT AS spent_ns,
    CASE WHEN s.waited_for = $after_reply THEN 'held' ELSE 'between' END AS name
  FROM segment AS s JOIN request AS r USING (request_key)
  WHERE r.ttft_ns IS NOT NULL AND list_contains($causes, s.cause::VARCHAR) AND s.waited_for <> $other_leg
  GROUP BY ALL HAVING spent_ns > 0
)
SELECT mode, scope, name, count(*) AS requests, sum(spent_ns)::BIGINT AS total_ns,
  {median_ns("spent_ns")} AS median_ns, {quantile_ns("spent_ns", 0.9)} AS p90_ns,
  max_by(request_id, spent_ns, $examples) AS examples
FROM per_request GROUP BY ALL
"""

_VERDICTS_SQL = f"""
SELECT mode, scope, verdict AS name, count(*) AS requests, coalesce(sum(ttft_ns), 0)::BIGINT AS total_ns,
  coalesce({median_ns("ttft_ns")}, 0) AS median_ns, max_by(request_id, coalesce(ttft_ns, 0), $examples) AS examples
FROM request ANTI JOIN under_way USING (request_key) GROUP BY ALL
"""

_LATE_SQL = f"""
SELECT mode, scope, count(registration_late_ns) AS told, count(*) FILTER (registration_late_ns > 0) AS late,
  coalesce({median_ns("registration_late_ns", "registration_late_ns > 0")}, 0) AS median_ns,
  coalesce({quantile_ns("registration_late_ns", 0.9, "registration_late_ns > 0")}, 0) AS p90_ns,
  coalesce(max_by(request_id, registration_late_ns, $examples), []) AS examples
FROM request WHERE mode = 'push' AND ttft_ns IS NOT NULL GROUP BY ALL
"""

_LATE_FOR_SQL = """
SELECT r.mode, r.scope, s.waited_for, sum(s.end_ns - s.start_ns)::BIGINT AS wait_ns
FROM segment AS s JOIN request AS r USING (request_key)
WHERE s.cause = $late GROUP BY ALL
"""

_POSTING_SQL = f"""
WITH spent AS (
  SELECT r.request_key, any_value(r.mode) AS mode, any_value(r.scope) AS scope, any_value(r.request_id) AS request_id,
    any_value(r.transfers) AS transfers, any_value(r.descriptors) AS descriptors,
    any_value(r.moved_bytes) AS moved_bytes,
    sum(s.end_ns - s.start_ns) FILTER (s.cause = $post) AS post_ns,
    any_value(r.transfer_high_ns) AS high_ns
  FROM request AS r JOIN segment AS s USING (request_key)
  WHERE r.ttft_ns IS NOT NULL AND r.transfers > 0 GROUP BY r.request_key
)
SELECT mode, scope, count(*) AS requests, sum(transfers)::BIGINT AS transfers, sum(post_ns)::BIGINT AS post_ns,
  {quantile_ns("post_ns", 0.9)} AS p90_ns, sum(greatest(high_ns - post_ns, 0))::BIGINT AS wire_high_ns,
  sum(descriptors)::BIGINT AS descriptors, sum(moved_bytes)::BIGINT AS moved_bytes,
  max_by(request_id, post_ns, $examples) AS examples
FROM spent WHERE post_ns IS NOT NULL GROUP BY ALL
"""

_DETECTION_SQL = f"""
WITH spent AS (
  SELECT r.mode, r.scope, r.request_key, r.request_id, sum(s.end_ns - s.start_ns)::BIGINT AS detection_ns,
    any_value(r.transfer_high_ns - r.transfer_ns) AS doubt_ns
  FROM request AS r JOIN segment AS s USING (request_key)
  WHERE r.ttft_ns IS NOT NULL AND s.cause = $detection GROUP BY ALL
), certain AS (
  SELECT *, detection_ns - doubt_ns AS proven_ns FROM spent WHERE doubt_ns <= $tight * detection_ns
)
SELECT mode, scope, count(*) AS requests, sum(proven_ns)::BIGINT AS total_ns,
  {median_ns("proven_ns")} AS median_ns, {quantile_ns("proven_ns", 0.9)} AS p90_ns,
  max_by(request_id, proven_ns, $examples) AS examples
FROM certain GROUP BY ALL
"""

_STEP_SQL = f"""
SELECT coalesce({median_ns("ended_ns - scheduled_ns")}, 0) AS step_ns
FROM step WHERE tokens > 0 AND ended_ns IS NOT NULL
  AND engine IN (SELECT decode_engine FROM request WHERE decode_engine <> '')
"""

_STRAGGLERS_SQL = f"""
WITH counted AS (
  SELECT decode_engine AS engine, straggler_rank AS rank, count(*) AS last, sum(straggler_ns)::BIGINT AS total_ns,
    {median_ns("straggler_ns")} AS median_ns, {quantile_ns("straggler_ns", 0.9)} AS p90_ns,
    max_by(request_id, straggler_ns, $examples) AS examples
  FROM request WHERE straggler_rank IS NOT NULL GROUP BY ALL
)
SELECT c.*, (sum(last) OVER (PARTITION BY engine))::BIGINT AS requests FROM counted AS c ORDER BY engine, rank
"""

_HELD_SQL = """
SELECT count(*) AS requests, coalesce(sum(held_after_end_ns), 0)::BIGINT AS total_ns,
  coalesce(max(held_after_end_ns), 0) AS longest_ns,
  coalesce(max_by(request_id, held_after_end_ns, $examples), []) AS examples
FROM request WHERE held_after_end_ns > 0
"""

_RETRIED_SQL = f"""
SELECT count(*) AS requests, coalesce(sum(lost_ns), 0)::BIGINT AS total_ns,
  coalesce({median_ns("lost_ns")}, 0) AS median_ns, coalesce({quantile_ns("lost_ns", 0.9)}, 0) AS p90_ns,
  coalesce(max_by(request_id, lost_ns, $examples), []) AS examples
FROM request WHERE lost_ns IS NOT NULL
"""

_PACING_SQL = """
WITH others AS (
  SELECT b.request_key, sum(b.extension_ns)::BIGINT AS by_others_ns
  FROM blame AS b JOIN request AS r USING (request_key)
  WHERE b.blamed_request_id <> r.request_id GROUP BY b.request_key
)
SELECT r.mode, r.scope, count(*) AS requests, sum(p.end_ns - p.start_ns)::BIGINT AS decode_ns,
  sum(p.extension_ns)::BIGINT AS extension_ns, coalesce(sum(o.by_others_ns), 0)::BIGINT AS by_others_ns,
  max_by(r.request_id, coalesce(o.by_others_ns, 0), $examples) AS examples
FROM pace AS p JOIN request AS r USING (request_key) LEFT JOIN others AS o USING (request_key)
WHERE p.tpot_ns IS NOT NULL GROUP BY ALL
"""

_LOST_SQL = "SELECT coalesce(sum(lost_records), 0)::BIGINT AS lost_records FROM process"


def gather(store: Store, load: Mapping[str, Any] | None) -> Facts:
    """Return the facts of the run in a store; `load` is what `rates` says of it."""
    few = {"examples": EXAMPLES}
    causes = _by_name(store.rows(_CAUSES_SQL, few))
    verdicts = _by_name(store.rows(_VERDICTS_SQL, few))
    legs = _by_name(
        store.rows(
            _LEGS_SQL,
            {
                **few,
                "after_reply": AFTER_REPLY,
                "other_leg": stages.ROUTER_PREFILL_SENT.name,
                "causes": [stages.PREFILL_REPLY.name, stages.ROUTER_DISPATCH.name, stages.DECODE_HOP.name],
            },
        )
    )
    waited: dict[Key, dict[str, int]] = defaultdict(dict)
    for row in store.rows(_LATE_FOR_SQL, {"late": stages.REGISTRATION_LATE.name}):
        waited[row["mode"], row["scope"]][row["waited_for"]] = row["wait_ns"]
    late = _by_group(store.rows(_LATE_SQL, few))
    posting = _by_group(store.rows(_POSTING_SQL, {**few, "post": stages.POST.name}))
    asked = {**few, "detection": stages.DETECTION.name, "tight": _TIGHT}
    step_ns = store.rows(_STEP_SQL)[0]["step_ns"]
    detection = {key: {**row, "step_ns": step_ns} for key, row in _by_group(store.rows(_DETECTION_SQL, asked)).items()}
    pacing = _by_group(store.rows(_PACING_SQL, few))
    groups = []
    for row in store.rows(_GROUPS_SQL):
        key = (row["mode"], row["scope"])
        groups.append(
            Group(
                **row,
                causes=causes.get(key, {}),
                verdicts=verdicts.get(key, {}),
                legs=legs.get(key, {}),
                late=Late(**late[key], waited_for=waited[key]) if key in late else Late(),
                posting=Posting(**posting[key]) if key in posting else Posting(),
                detection=Detection(**detection[key]) if key in detection else Detection(),
                pacing=Pacing(**pacing[key]) if key in pacing else Pacing(),
            )
        )
    return Facts(
        groups=tuple(groups),
        stragglers=tuple(Straggler(**_plain(row)) for row in store.rows(_STRAGGLERS_SQL, few)),
        held=Held(**_plain(store.rows(_HELD_SQL, few)[0])),
        retried=Retried(**_plain(store.rows(_RETRIED_SQL, few)[0])),
        lost_records=store.rows(_LOST_SQL)[0]["lost_records"],
        offered_rate_hz=load["offered_rate_hz"] if load else None,
        served_rate_hz=load["served_rate_hz"] if load else None,
        saturated=bool(load and load["saturated"]),
    )


def _plain(row: Row) -> Row:
    """Return a row whose list of ids is a tuple, as the facts hold it."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def _by_group(rows: list[Row]) -> dict[Key, Row]:
    return {(row.pop("mode"), row.pop("scope")): _plain(row) for row in rows}


def _by_name(rows: list[Row]) -> dict[Key, dict[str, CauseFacts]]:
    found: dict[Key, dict[str, CauseFacts]] = defaultdict(dict)
    for row in rows:
        key, name = (row.pop("mode"), row.pop("scope")), row.pop("name")
        found[key][name] = CauseFacts(**_plain(row))
    return found
