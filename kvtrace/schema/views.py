"""The store's views: what people, panels and queries read. Times get a TIMESTAMPTZ beside the BIGINT ns.

Sums are cast back to BIGINT: DuckDB makes them HUGEINT, which Grafana's plug-in turns into text.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace.schema.keeping import LOOK_BACK_NS
from kvtrace.schema.shape import View, at_time, columns, text
from kvtrace.schema.vocabulary import CAUSE, EVENT_NAMED, VOCABULARY
from kvtrace.schema.walked import WALK_REQUEST, WALK_SEGMENT
from kvtrace.verdict import INCOMPLETE


def _fact(name: str) -> str:
    return f"coalesce(map_extract(p.facts, {text(name)})[1], '')"


ENGINE_PROCESS = View(
    "engine_process",
    "Processes with the facts that matter, and the engine core that each belongs to.",
    columns(
        ("process", "INTEGER", "Number of the process."),
        ("core", "INTEGER", "The engine core it works for (its parent, where that is one), else itself."),
        ("kind", "VARCHAR", "router, api, core or worker; client or engine where it was imported."),
        ("engine", "VARCHAR", "Engine id, '' if it is none."),
        ("role", "VARCHAR", "vLLM's kv_role."),
        ("rank", "BIGINT", "Tensor-parallel rank, NULL where there is none."),
        ("host", "VARCHAR", "Id of its host."),
        ("pid", "BIGINT", "Process id on its host."),
        ("started", "TIMESTAMP WITH TIME ZONE", "When it started."),
        ("first_at", "TIMESTAMP WITH TIME ZONE", "Its first event."),
        ("last_at", "TIMESTAMP WITH TIME ZONE", "Its last event."),
        ("lost_records", "BIGINT", "Records that it could not keep."),
    ),
    f"""WITH stated AS (
  SELECT
    p.process, p.domain, p.host, p.pid, p.parent_pid, p.started_ns, p.first_ns, p.last_ns, p.lost_records,
    {_fact("kind")} AS kind, {_fact("engine_id")} AS engine, {_fact("role")} AS role,
    TRY_CAST(map_extract(p.facts, 'rank')[1] AS BIGINT) AS rank
  FROM process AS p
), joined AS (
  SELECT
    p.*, coalesce(c.process, p.process) AS core,
    coalesce(nullif(p.engine, ''), nullif(child.engine, ''), '') AS known_engine
  FROM stated AS p
    LEFT JOIN stated AS c ON p.kind = 'worker' AND c.kind = 'core' AND c.domain = p.domain AND c.pid = p.parent_pid
      AND c.started_ns <= p.started_ns
    LEFT JOIN stated AS child ON p.kind = 'api' AND child.kind = 'core' AND child.domain = p.domain
      AND child.parent_pid = p.pid AND child.started_ns >= p.started_ns
  QUALIFY row_number() OVER (PARTITION BY p.process ORDER BY c.started_ns DESC, child.started_ns) = 1
)
SELECT
  process, core, kind, known_engine AS engine, role, rank, host, pid, {at_time("started_ns")} AS started,
  {at_time("first_ns")} AS first_at, {at_time("last_ns")} AS last_at, lost_records
FROM joined""",
)

TTFT = View(
    "ttft",
    "Every request's time to first token and where it went: the shares sum to ttft_ns exactly.",
    columns(
        ("request_id", "VARCHAR", "The request."),
        ("client_request_id", "VARCHAR", "The id that the client sent; may repeat."),
        ("attempt", "INTEGER", "0 for the first attempt."),
        ("started", "TIMESTAMP WITH TIME ZONE", "First moment seen."),
        ("mode", "VARCHAR", "push, pull, local or unknown."),
        ("verdict", "VARCHAR", "How it ended."),
        ("scope", "VARCHAR", "Where the first token was seen. Scopes do not compare."),
        ("prefill_engine", "VARCHAR", "Engine id of P."),
        ("decode_engine", "VARCHAR", "Engine id of D."),
        ("prompt_tokens", "BIGINT", "Length of the prompt; NULL if nobody said it."),
        ("ttft_ms", "DOUBLE", "Time to first token in ms; NULL if there was none."),
        ("ttft_ns", "BIGINT", "The same in ns."),
        ("compute_ns", "BIGINT", "Share."),
        ("compute_run_ns", "BIGINT", "Part of compute."),
        ("compute_queue_ns", "BIGINT", "Part of compute."),
        ("coordination_ns", "BIGINT", "Share."),
        ("transfer_ns", "BIGINT", "Share."),
        ("transfer_low_ns", "BIGINT", "The least that transfer can have been."),
        ("transfer_high_ns", "BIGINT", "The most that transfer can have been."),
        ("unattributed_ns", "BIGINT", "Share: time that no event explains."),
        ("top_cause", "VARCHAR", "The cause that took most of it."),
        ("top_cause_ns", "BIGINT", "How much that was."),
        ("crosses_hosts", "BOOLEAN", "Some segment rests on two hosts' wall clocks."),
        ("note", "VARCHAR", "What else is to be said."),
    ),
    f"""WITH per_cause AS (
  SELECT request_key, cause, sum(end_ns - start_ns)::BIGINT AS cause_ns FROM segment GROUP BY request_key, cause
), top AS (
  SELECT request_key, arg_max(cause, cause_ns) AS top_cause, max(cause_ns) AS top_cause_ns
  FROM per_cause GROUP BY request_key
)
SELECT
  r.request_id, r.client_request_id, r.attempt, {at_time("r.start_ns")} AS started, r.mode, r.verdict, r.scope,
  r.prefill_engine, r.decode_engine, r.prompt_tokens, r.ttft_ns / 1e6 AS ttft_ms, r.ttft_ns, r.compute_ns,
  r.compute_run_ns, r.compute_queue_ns, r.coordination_ns, r.transfer_ns, r.transfer_low_ns, r.transfer_high_ns,
  r.unattributed_ns, top.top_cause, top.top_cause_ns, r.crosses_hosts, r.note
FROM request AS r LEFT JOIN top USING (request_key)""",
)

CRITICAL_PATH = View(
    "critical_path",
    "Every segment of every request's critical path, with the request's id.",
    columns(
        ("request_id", "VARCHAR", "The request."),
        ("attempt", "INTEGER", "0 for the first attempt."),
        ("position", "INTEGER", "Order along the path, from 0."),
        ("started", "TIMESTAMP WITH TIME ZONE", "When it began."),
        ("start_ns", "BIGINT", "Unix ns."),
        ("duration_ns", "BIGINT", "How long."),
        ("class", "VARCHAR", "The class, compute told apart as run and queue."),
        ("answer", "VARCHAR", "The coarse class."),
        ("cause", "VARCHAR", "The finer name."),
        ("where", "VARCHAR", "Where the time passed."),
        ("waited_for", "VARCHAR", "What the request waited for."),
        ("crosses_hosts", "BOOLEAN", "It rests on two hosts' wall clocks."),
    ),
    f"""SELECT
  r.request_id, r.attempt, s.position, {at_time("s.start_ns")} AS started, s.start_ns,
  s.end_ns - s.start_ns AS duration_ns, s.class, split_part(s.class, '.', 1) AS answer, s.cause, s."where",
  s.waited_for, s.crosses_hosts
FROM segment AS s JOIN request AS r USING (request_key)""",
)

HIDDEN_WORK = View(
    "hidden_work",
    "Work beside the critical path, with the request's id.",
    columns(
        ("request_id", "VARCHAR", "The request."),
        ("attempt", "INTEGER", "0 for the first attempt."),
        ("started", "TIMESTAMP WITH TIME ZONE", "When it began."),
        ("start_ns", "BIGINT", "Unix ns."),
        ("duration_ns", "BIGINT", "How long it took."),
        ("slack_ns", "BIGINT", "How much longer it could have taken unnoticed."),
        ("class", "VARCHAR", "What it would have been charged to on the path."),
        ("cause", "VARCHAR", "The finer name."),
        ("where", "VARCHAR", "Where the time passed."),
    ),
    f"""SELECT
  r.request_id, r.attempt, {at_time("h.start_ns")} AS started, h.start_ns, h.duration_ns, h.slack_ns, h.class, h.cause,
  h."where"
FROM hidden AS h JOIN request AS r USING (request_key)""",
)

TPOT = View(
    "tpot",
    "Every request's time per output token after the first, and what made D's steps longer.",
    columns(
        ("request_id", "VARCHAR", "The request."),
        ("attempt", "INTEGER", "0 for the first attempt."),
        ("started", "TIMESTAMP WITH TIME ZONE", "D had its first token."),
        ("mode", "VARCHAR", "push, pull, local or unknown."),
        ("decode_engine", "VARCHAR", "Engine id of D."),
        ("tokens", "BIGINT", "Tokens after the first."),
        ("steps", "BIGINT", "Steps that made them."),
        ("tpot_ms", "DOUBLE", "Mean time per token after the first, ms."),
        ("tpot_ns", "BIGINT", "The same in ns."),
        ("itl_p50_ns", "BIGINT", "Median time between two steps that made tokens of it."),
        ("itl_max_ns", "BIGINT", "The longest of those."),
        ("decode_ns", "BIGINT", "From the first to the last token."),
        ("extension_ns", "BIGINT", "The part by which connector work on the forward thread made steps longer."),
        ("occupancy_ns", "BIGINT", "How long the connector took there, whether or not it cost anything."),
        ("by_others_ns", "BIGINT", "The part of it in which other requests' transfers were posted, or KV copied."),
        ("mixed_ns", "BIGINT", "Time in steps that worked on somebody's prompt too."),
        ("unattributed_ns", "BIGINT", "Time that no step explains."),
    ),
    f"""WITH parts AS (
  SELECT request_key, coalesce(sum(duration_ns) FILTER (cause = 'decode.mixed'), 0)::BIGINT AS mixed_ns,
    coalesce(sum(duration_ns) FILTER (cause = 'unattributed'), 0)::BIGINT AS unattributed_ns
  FROM pace_part GROUP BY request_key
), others AS (
  SELECT b.request_key, sum(b.extension_ns)::BIGINT AS by_others_ns
  FROM blame AS b JOIN request AS r USING (request_key)
  WHERE b.blamed_request_id <> r.request_id GROUP BY b.request_key
)
SELECT
  r.request_id, r.attempt, {at_time("p.start_ns")} AS started, r.mode, r.decode_engine, p.tokens, p.steps,
  p.tpot_ns / 1e6 AS tpot_ms, p.tpot_ns, p.itl_p50_ns, p.itl_max_ns, p.end_ns - p.start_ns AS decode_ns,
  p.extension_ns, p.occupancy_ns, coalesce(o.by_others_ns, 0)::BIGINT AS by_others_ns,
  coalesce(s.mixed_ns, 0)::BIGINT AS mixed_ns, coalesce(s.unattributed_ns, 0)::BIGINT AS unattributed_ns
FROM pace AS p JOIN request AS r USING (request_key) LEFT JOIN parts AS s USING (request_key)
  LEFT JOIN others AS o USING (request_key)""",
)

BLAMED = View(
    "blamed",
    "The requests whose transfers made other requests' steps longer.",
    columns(
        ("request_id", "VARCHAR", "The request whose transfers were posted, or KV copied, on the forward thread."),
        ("mode", "VARCHAR", "push, pull, local or unknown; NULL if the request is not in the store."),
        ("moved_bytes", "BIGINT", "Bytes moved by its transfers."),
        ("descriptors", "BIGINT", "Descriptors of its transfers."),
        ("victims", "BIGINT", "Other requests whose steps became longer."),
        ("extension_ns", "BIGINT", "By how much, over all of them."),
    ),
    """SELECT
  b.blamed_request_id AS request_id, any_value(c.mode) AS mode, any_value(c.moved_bytes) AS moved_bytes,
  any_value(c.descriptors) AS descriptors, count(DISTINCT b.request_key)::BIGINT AS victims,
  sum(b.extension_ns)::BIGINT AS extension_ns
FROM blame AS b JOIN request AS r USING (request_key)
  LEFT JOIN (SELECT request_id, any_value(mode) AS mode, max(moved_bytes) AS moved_bytes,
    max(descriptors) AS descriptors FROM request GROUP BY request_id) AS c ON c.request_id = b.blamed_request_id
WHERE b.blamed_request_id <> r.request_id
GROUP BY b.blamed_request_id""",
)

UNDER_WAY = View(
    "under_way",
    "Requests that may still get their first token: they are called incomplete only since the recording goes on.",
    columns(
        ("request_key", "BIGINT", "Key of the request."),
        ("request_id", "VARCHAR", "The request."),
        ("seen_ns", "BIGINT", "Last moment seen so far, unix ns; not longer ago than the recorder looks back."),
    ),
    f"""SELECT request_key, request_id, coalesce(end_ns, start_ns) AS seen_ns
FROM request
WHERE ttft_ns IS NULL AND verdict = {text(INCOMPLETE)}
  AND EXISTS (SELECT 1 FROM run WHERE name = 'recorder.state' AND value = 'recording')
  AND coalesce(end_ns, start_ns) >= (SELECT max(coalesce(end_ns, start_ns)) FROM request) - {LOOK_BACK_NS}""",
)

VIEWS: tuple[View, ...] = (
    VOCABULARY,
    CAUSE,
    ENGINE_PROCESS,
    EVENT_NAMED,
    TTFT,
    CRITICAL_PATH,
    HIDDEN_WORK,
    TPOT,
    BLAMED,
    UNDER_WAY,
    WALK_REQUEST,
    WALK_SEGMENT,
)
