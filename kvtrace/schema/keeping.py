"""The SQL that fills the tables of `kept`: each for what was touched since a time, or for everything."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace.schema.kept import PER_OCTAVE, WINDOWS_NS
from kvtrace.schema.shape import at_time, text

FINE_NS, COARSE_NS = WINDOWS_NS
LOOK_BACK_NS = 600_000_000_000
"""A request older than this is not worked out again; nor is looked for what its legs, a transfer's siblings or an
engine's steps did longer ago."""


def _listed(*names: str) -> str:
    return ", ".join(text(name) for name in names)


_STEP_STAGES = _listed(
    "step.scheduled", "step.started", "step.forwarded", "step.connected", "step.ended",
    "step.worker_starved", "step.result_starved",
)  # fmt: skip
_TRANSFER_STAGES = _listed(
    "transfer.prepared", "transfer.post_started", "transfer.post_ended", "transfer.done", "transfer.failed",
    "transfer.probed",
)  # fmt: skip
_ENQUEUED = _listed("prefill.enqueued", "decode.enqueued")
_PREFILL_OVER = _listed("prefill.scheduled", "prefill.aborted", "prefill.finished")
_DECODE_OVER = _listed("decode.scheduled", "decode.aborted", "decode.finished")
_KV_OVER = _listed("decode.ready", "decode.aborted", "decode.finished", "decode.load_failed")
_LEG_STAGES = ", ".join((_ENQUEUED, _PREFILL_OVER, _DECODE_OVER, text("decode.allocated"), _KV_OVER))

# Steps ----------------------------------------------------------------------------------------------------

TOUCHED_STEPS = f"""
CREATE OR REPLACE TEMP TABLE touched AS
WITH own AS (
  SELECT DISTINCT p.core AS process, e.a AS step FROM event AS e JOIN place AS p USING (process)
  WHERE e.t_ns >= $since AND e.stage IN ({_STEP_STAGES})
)
SELECT process, step FROM own UNION SELECT process, step + 1 FROM own
"""
STEPS_FROM = """
SELECT min(least(s.scheduled_ns, s.started_ns, s.forwarded_ns, s.connected_ns, s.ended_ns))
FROM step AS s JOIN touched AS t ON t.process = s.process AND t.step = s.step
"""
FORGET_STEPS = "DELETE FROM step USING touched AS t WHERE t.process = step.process AND t.step = step.step"


def steps(among: str, before: str) -> str:
    """Return the INSERT of steps; `among` is a condition on place p and event e, `before` one on table step."""
    return f"""
INSERT INTO step
WITH seen AS (
  SELECT
    p.core AS process, e.a AS step, max(p.engine) AS engine,
    min(e.t_ns) FILTER (e.stage = 'step.scheduled') AS scheduled_ns,
    min(e.t_ns) FILTER (e.stage = 'step.started') AS started_ns,
    max(e.t_ns) FILTER (e.stage = 'step.forwarded') AS forwarded_ns,
    max(e.t_ns) FILTER (e.stage = 'step.connected') AS connected_ns,
    max(e.t_ns) FILTER (e.stage = 'step.ended') AS ended_ns,
    max(e.b) FILTER (e.stage = 'step.scheduled') AS tokens,
    max(e.c) FILTER (e.stage = 'step.scheduled') AS requests,
    max(e.d) FILTER (e.stage = 'step.scheduled') AS waiting,
    count(*) FILTER (e.stage = 'step.started') AS ranks,
    max(e.c) FILTER (e.stage = 'step.connected') AS connector_ns,
    arg_max(e.d, e.c) FILTER (e.stage = 'step.connected') AS before_forward_ns,
    arg_min(e.b, e.t_ns) FILTER (e.stage = 'step.ended') AS starved_ns,
    coalesce(max(e.c) FILTER (e.stage = 'step.worker_starved'), 0) AS forward_starved_ns,
    coalesce(max(e.d) FILTER (e.stage = 'step.worker_starved'), 0) AS connector_starved_ns,
    coalesce(max(e.c) FILTER (e.stage = 'step.result_starved'), 0) AS starved_behind_ns,
    CASE WHEN arg_min(e.c, e.t_ns) FILTER (e.stage = 'step.ended') > 0
      THEN (min(e.t_ns) FILTER (e.stage = 'step.ended')) - (arg_min(e.c, e.t_ns) FILTER (e.stage = 'step.ended'))
        - (min(e.t_ns) FILTER (e.stage = 'step.connected')) END AS looked_ns
  FROM event AS e JOIN place AS p USING (process)
  WHERE e.stage IN ({_STEP_STAGES}) AND {among}
  GROUP BY p.core, e.a
), spaced AS (
  SELECT
    process, step, scheduled_ns - lag(scheduled_ns) OVER (PARTITION BY process ORDER BY scheduled_ns, step) AS gap_ns
  FROM (
    SELECT process, step, scheduled_ns FROM seen WHERE scheduled_ns IS NOT NULL
    UNION ALL SELECT process, step, scheduled_ns FROM step WHERE {before}
  )
)
SELECT
  s.process, s.step, s.engine, {at_time("coalesce(s.scheduled_ns, s.started_ns)")} AS ts, s.scheduled_ns, s.started_ns,
  s.forwarded_ns, s.connected_ns, s.ended_ns, s.tokens, s.requests, s.waiting, s.ranks, s.connector_ns,
  s.before_forward_ns, CASE WHEN g.gap_ns < {LOOK_BACK_NS} THEN g.gap_ns END AS gap_ns, s.starved_ns,
  s.forward_starved_ns, s.connector_starved_ns,
  greatest(0, s.starved_behind_ns - greatest(0, coalesce(s.looked_ns, 0))) AS result_starved_ns
FROM seen AS s LEFT JOIN spaced AS g ON g.process = s.process AND g.step = s.step
ORDER BY coalesce(s.scheduled_ns, s.started_ns)
"""


OF_TOUCHED_STEPS = "e.t_ns >= $from AND (p.core, e.a) IN (SELECT (process, step) FROM touched)"

BEFORE_TOUCHED_STEPS = f"scheduled_ns >= $from - {LOOK_BACK_NS}"

# Legs -----------------------------------------------------------------------------------------------------

TOUCHED_LEGS = f"""
CREATE OR REPLACE TEMP TABLE touched AS
SELECT DISTINCT p.engine, e.request FROM event AS e JOIN place AS p USING (process)
WHERE e.t_ns >= $since AND e.stage IN ({_LEG_STAGES})
"""
LEGS_FROM = """
SELECT min(l.first_ns) FROM leg AS l JOIN touched AS t ON t.request = l.request AND t.engine = l.engine
WHERE l.first_ns >= $back
"""
FORGET_LEGS = """
DELETE FROM leg USING touched AS t WHERE t.request = leg.request AND t.engine = leg.engine AND leg.first_ns >= $back
"""


def legs(among: str) -> str:
    """Return the INSERT of legs; `among` is a condition on place p and event e."""
    return f"""
INSERT INTO leg
WITH seen AS (
  SELECT
    p.engine, e.request,
    min(e.t_ns) FILTER (e.stage = 'prefill.enqueued') AS prefill_from_ns,
    min(e.t_ns) FILTER (e.stage IN ({_PREFILL_OVER})) AS prefill_to_ns,
    min(e.t_ns) FILTER (e.stage = 'decode.enqueued') AS decode_from_ns,
    min(e.t_ns) FILTER (e.stage IN ({_DECODE_OVER})) AS decode_to_ns,
    min(e.t_ns) FILTER (e.stage = 'decode.allocated' AND e.b > 0) AS kv_from_ns,
    min(e.t_ns) FILTER (e.stage IN ({_KV_OVER})) AS kv_to_ns
  FROM event AS e JOIN place AS p USING (process)
  WHERE e.stage IN ({_LEG_STAGES}) AND {among}
  GROUP BY p.engine, e.request
)
SELECT
  engine, request, least(prefill_from_ns, decode_from_ns, kv_from_ns) AS first_ns, prefill_from_ns, prefill_to_ns,
  decode_from_ns, decode_to_ns, kv_from_ns, kv_to_ns
FROM seen WHERE least(prefill_from_ns, decode_from_ns, kv_from_ns) IS NOT NULL ORDER BY first_ns
"""


OF_TOUCHED_LEGS = "e.t_ns >= $from AND (p.engine, e.request) IN (SELECT (engine, request) FROM touched)"

# Transfers ------------------------------------------------------------------------------------------------

# A transfer is touched by events of its own, of its siblings, and by what the other side says of the request.
TOUCHED_TRANSFERS = f"""
CREATE OR REPLACE TEMP TABLE touched AS
WITH own AS (
  SELECT process, a AS transfer, request FROM event WHERE t_ns >= $since AND stage IN ({_TRANSFER_STAGES})
), known AS (
  SELECT process, transfer, request, remote_request FROM transfer WHERE post_started_ns >= $back
)
SELECT DISTINCT process, transfer FROM own
UNION SELECT process, transfer FROM known WHERE request IN (SELECT request FROM own)
UNION SELECT process, transfer FROM known WHERE remote_request IN (
  SELECT request FROM event WHERE t_ns >= $since AND stage IN ('transfer.notified', {_ENQUEUED})
)
"""
TRANSFERS_FROM = """
SELECT min(least(s.prepared_ns, s.post_started_ns, s.post_ended_ns, s.done_ns, s.probed_ns, s.failed_ns))
FROM transfer AS s JOIN touched AS t ON t.process = s.process AND t.transfer = s.transfer
"""
FORGET_TRANSFERS = """
DELETE FROM transfer USING touched AS t WHERE t.process = transfer.process AND t.transfer = transfer.transfer
"""


def transfers(among: str, of_others: str, legs: str) -> str:
    """Return the INSERT of transfers.

    `among` is a condition on event e, `of_others` one on the time t_ns, `legs` one on table leg l.
    """
    return f"""
INSERT INTO transfer
WITH seen AS (
  SELECT
    process, a AS transfer, max(nullif(request, '')) AS request,
    max(ref) FILTER (stage = 'transfer.prepared') AS remote_request,
    max(c) FILTER (stage = 'transfer.prepared') AS rank,
    max(b) FILTER (stage = 'transfer.post_ended') AS moved_bytes,
    coalesce(max(nullif(c, 0)) FILTER (stage = 'transfer.post_ended'),
      max(b) FILTER (stage = 'transfer.prepared')) AS descriptors,
    min(t_ns) FILTER (stage = 'transfer.prepared') AS prepared_ns,
    min(t_ns) FILTER (stage = 'transfer.post_started') AS post_started_ns,
    min(t_ns) FILTER (stage = 'transfer.post_ended') AS post_ended_ns,
    max(d) FILTER (stage = 'transfer.post_ended') = 1 AS done_at_post,
    max(nullif(b, 0)) FILTER (stage = 'transfer.done') AS last_pending_ns,
    min(t_ns) FILTER (stage = 'transfer.done') AS done_ns,
    max(c) FILTER (stage = 'transfer.done') AS polls,
    max(nullif(b, 0)) FILTER (stage = 'transfer.probed') AS probe_pending_ns,
    min(t_ns) FILTER (stage = 'transfer.probed') AS probed_ns,
    min(t_ns) FILTER (stage = 'transfer.failed') AS failed_ns,
    max(ref) FILTER (stage = 'transfer.failed') AS reason
  FROM event AS e
  WHERE stage IN ({_TRANSFER_STAGES}) AND {among}
  GROUP BY process, a
), notified AS (
  SELECT request, t_ns FROM event WHERE stage = 'transfer.notified' AND {of_others}
), home AS (
  SELECT l.request, max(l.engine) AS engine FROM leg AS l
  WHERE l.request IN (SELECT remote_request FROM seen) AND coalesce(l.prefill_from_ns, l.decode_from_ns) IS NOT NULL
    AND {legs}
  GROUP BY l.request
), whole AS (
  SELECT
    s.process, s.transfer, p.engine, s.request, s.remote_request, s.rank, s.moved_bytes, s.descriptors,
    {at_time("s.post_started_ns")} AS ts, s.prepared_ns, s.post_started_ns, s.post_ended_ns, s.done_at_post,
    s.last_pending_ns + q.offset_ns AS last_pending_ns, s.done_ns, s.polls,
    s.probe_pending_ns + q.offset_ns AS probe_pending_ns, s.probed_ns, n.t_ns AS notified_ns, s.failed_ns, s.reason,
    coalesce(h.engine, '') AS peer,
    least(s.done_ns, s.probed_ns, CASE WHEN s.done_at_post THEN s.post_ended_ns END) AS seen_ns,
    s.post_started_ns IS NOT NULL AS is_posted
  FROM seen AS s
    LEFT JOIN place AS p USING (process)
    LEFT JOIN process AS q USING (process)
    LEFT JOIN home AS h ON h.request = s.remote_request
    ASOF LEFT JOIN notified AS n ON n.request = s.remote_request AND n.t_ns >= s.post_started_ns
)
SELECT
  * EXCLUDE (is_posted),
  CASE WHEN is_posted THEN count(*) OVER same END AS siblings,
  CASE WHEN is_posted AND seen_ns IS NOT NULL THEN seen_ns = max(seen_ns) OVER same END AS is_last
FROM whole
WINDOW same AS (PARTITION BY engine, request, is_posted)
ORDER BY coalesce(post_started_ns, prepared_ns)
"""


OF_TOUCHED_TRANSFERS = "t_ns >= $from AND (process, a) IN (SELECT (process, transfer) FROM touched)"
LEGS_OF_TOUCHED_TRANSFERS = f"l.first_ns >= $from - {LOOK_BACK_NS}"

# Events by kind -------------------------------------------------------------------------------------------

_NOTABLE = _listed(
    "handshake.started", "handshake.ended", "transfer.failed", "decode.load_failed", "notification.orphaned",
    "prefill.lease_started", "prefill.lease_extended", "prefill.lease_expired", "router.failed", "client.failed",
    "tracing.disabled", "thread.placed",
)  # fmt: skip
FORGET_NOTABLE = "DELETE FROM notable WHERE t_ns >= $since"
NOTABLE = f"""
INSERT INTO notable
SELECT process, stage, t_ns, request, "ref", a, b FROM event WHERE t_ns >= $since AND stage IN ({_NOTABLE})
ORDER BY t_ns
"""
FORGET_OCCURRENCES = "DELETE FROM occurrence WHERE from_ns >= $since"
OCCURRENCES = f"""
INSERT INTO occurrence
SELECT t_ns // {FINE_NS} * {FINE_NS} AS from_ns, process, stage, count(*) AS events
FROM event WHERE t_ns >= $since GROUP BY ALL ORDER BY from_ns
"""

# Times by cause -------------------------------------------------------------------------------------------


def bucket(ns: str) -> str:
    """Return SQL for the bucket that a time in ns belongs to."""
    return f"floor(log2(greatest({ns}, 1)) * {PER_OCTAVE})::INTEGER"


_CLASSES = _listed("compute.run", "compute.queue", "coordination", "transfer", "unattributed")
TALLY_FINE = f"""
INSERT INTO tally
WITH chosen AS (
  SELECT
    request_key, start_ns // {FINE_NS} * {FINE_NS} AS from_ns, mode, scope, prefill_engine, decode_engine,
    ttft_ns IS NOT NULL AS is_answered, [compute_run_ns, compute_queue_ns, coordination_ns, transfer_ns,
      unattributed_ns] AS shares
  FROM request WHERE start_ns >= $from AND start_ns < $to
), timed AS (
  SELECT
    'path' AS what, s.request_key, s.cause, s.class, sum(s.end_ns - s.start_ns)::BIGINT AS ns, true AS is_first
  FROM segment AS s JOIN chosen AS c USING (request_key) WHERE c.is_answered GROUP BY s.request_key, s.cause, s.class
  UNION ALL
  SELECT
    'hidden', h.request_key, h.cause, h.class, h.duration_ns,
    row_number() OVER (PARTITION BY h.request_key, h.cause, h.class ORDER BY h.start_ns) = 1
  FROM hidden AS h JOIN chosen USING (request_key)
  UNION ALL
  SELECT 'slack', h.request_key, h.cause, h.class, h.slack_ns, false
  FROM hidden AS h JOIN chosen USING (request_key) WHERE h.slack_ns IS NOT NULL
  UNION ALL
  SELECT 'pace', q.request_key, q.cause, q.class, q.duration_ns, true
  FROM pace_part AS q JOIN chosen USING (request_key)
  UNION ALL
  SELECT 'share', request_key, '', unnest([{_CLASSES}]), unnest(shares), true FROM chosen WHERE is_answered
)
SELECT
  t.what, {FINE_NS} AS window_ns, c.from_ns, c.mode, c.scope, c.prefill_engine, c.decode_engine, t.cause, t.class,
  CASE t.what WHEN 'pace' THEN 0 ELSE {bucket("t.ns")} END AS bucket, count(*) AS times,
  count(*) FILTER (t.is_first) AS requests, sum(t.ns)::BIGINT AS total_ns, min(t.ns) AS least_ns, max(t.ns) AS most_ns
FROM timed AS t JOIN chosen AS c USING (request_key)
GROUP BY ALL ORDER BY t.what, c.from_ns
"""
TALLY_COARSE = f"""
INSERT INTO tally
SELECT
  what, {COARSE_NS} AS window_ns, from_ns // {COARSE_NS} * {COARSE_NS} AS from_ns, mode, scope, prefill_engine,
  decode_engine, cause, class, bucket, sum(times)::BIGINT AS times, sum(requests)::BIGINT AS requests,
  sum(total_ns)::BIGINT AS total_ns, min(least_ns) AS least_ns, max(most_ns) AS most_ns
FROM tally WHERE window_ns = {FINE_NS} AND from_ns >= $from AND from_ns < $to
GROUP BY ALL ORDER BY what, 3
"""
FORGET_TALLY = "DELETE FROM tally WHERE window_ns = $window AND from_ns >= $from AND from_ns < $to"
TALLIED = "SELECT coalesce(max(from_ns) + $window, 0) FROM tally WHERE window_ns = $window"
