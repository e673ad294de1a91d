-- Which engines took part, and what each did.
--
-- engine           VARCHAR  Engine id.
-- role             VARCHAR  vLLM's kv_role.
-- processes        BIGINT   Processes that emitted for it; a restart adds some.
-- hosts            BIGINT   Hosts that they ran on.
-- requests         BIGINT   Requests that were prefilled or decoded on it.
-- steps            BIGINT   Steps that it made up.
-- transfers        BIGINT   Transfers that it drove.
-- failed_requests  BIGINT   Requests on it of another verdict than complete and no handoff, but for those under way.
WITH engine_of AS (
  SELECT engine, max(role) AS role, count(*) AS processes, count(DISTINCT host) AS hosts
  FROM engine_process WHERE engine <> '' GROUP BY engine
), worked AS (
  SELECT prefill_engine AS engine, request_key, verdict FROM request
  UNION ALL
  SELECT decode_engine, request_key, verdict FROM request WHERE decode_engine IS DISTINCT FROM prefill_engine
), served AS (
  SELECT
    engine, count(*) AS requests,
    count(*) FILTER (verdict NOT IN ('complete', 'no handoff') AND seen_ns IS NULL) AS failed_requests
  FROM worked LEFT JOIN under_way USING (request_key) GROUP BY engine
), stepped AS (
  SELECT engine, count(*) AS steps FROM step GROUP BY engine
), moved AS (
  SELECT engine, count(*) AS transfers FROM transfer GROUP BY engine
)
SELECT
  e.engine, e.role, e.processes, e.hosts, coalesce(s.requests, 0) AS requests, coalesce(t.steps, 0) AS steps,
  coalesce(m.transfers, 0) AS transfers, coalesce(s.failed_requests, 0) AS failed_requests
FROM engine_of AS e LEFT JOIN served AS s USING (engine) LEFT JOIN stepped AS t USING (engine)
  LEFT JOIN moved AS m USING (engine)
ORDER BY e.engine
