-- Which engines took part, and what each did.
--
-- engine                  VARCHAR  Engine id.
-- role                    VARCHAR  vLLM's kv_role.
-- processes               BIGINT   Processes that emitted for it; a restart adds some.
-- hosts                   BIGINT   Hosts that they ran on.
-- requests                BIGINT   Requests that were prefilled or decoded on it.
-- steps                   BIGINT   Steps that it made up.
-- transfers               BIGINT   Transfers that it drove.
-- failed_requests         BIGINT   Requests on it of another verdict than complete and no handoff, but for those under way.
-- max_num_batched_tokens  BIGINT   The most tokens that its scheduler, the last one started, puts into a step; NULL if it does not say.
-- max_num_seqs            BIGINT   The most requests that it keeps running; NULL if it does not say.
-- kv_blocks               BIGINT   Blocks of its KV cache; NULL if it does not say.
-- nixl_backends           VARCHAR  Backends of its workers' NIXL agents; NULL if they do not say.
-- ucx_tls                 VARCHAR  UCX_TLS of its workers; NULL if it is not set.
-- ucx_net_devices         VARCHAR  UCX_NET_DEVICES of its workers; NULL if it is not set. Values that differ stand in order.
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
), limited AS (
  -- A core that says one limit says all that its release knows.
  SELECT p.engine, arg_max(q.facts, coalesce(q.first_ns, 0)) AS facts
  FROM engine_process AS p JOIN process AS q USING (process)
  WHERE map_extract(q.facts, 'max_num_batched_tokens')[1] IS NOT NULL
    OR map_extract(q.facts, 'max_num_seqs')[1] IS NOT NULL OR map_extract(q.facts, 'kv_blocks')[1] IS NOT NULL
  GROUP BY p.engine
), stated AS (
  SELECT
    p.engine,
    string_agg(DISTINCT map_extract(q.facts, 'nixl_backends')[1], '; ' ORDER BY map_extract(q.facts, 'nixl_backends')[1])
      AS nixl_backends,
    string_agg(DISTINCT map_extract(q.facts, 'ucx_tls')[1], '; ' ORDER BY map_extract(q.facts, 'ucx_tls')[1]) AS ucx_tls,
    string_agg(DISTINCT map_extract(q.facts, 'ucx_net_devices')[1], '; '
      ORDER BY map_extract(q.facts, 'ucx_net_devices')[1]) AS ucx_net_devices
  FROM engine_process AS p JOIN process AS q USING (process) GROUP BY p.engine
), moved AS (
  SELECT engine, count(*) AS transfers FROM transfer GROUP BY engine
)
SELECT
  e.engine, e.role, e.processes, e.hosts, coalesce(s.requests, 0) AS requests, coalesce(t.steps, 0) AS steps,
  coalesce(m.transfers, 0) AS transfers, coalesce(s.failed_requests, 0) AS failed_requests,
  TRY_CAST(map_extract(k.facts, 'max_num_batched_tokens')[1] AS BIGINT) AS max_num_batched_tokens,
  TRY_CAST(map_extract(k.facts, 'max_num_seqs')[1] AS BIGINT) AS max_num_seqs,
  TRY_CAST(map_extract(k.facts, 'kv_blocks')[1] AS BIGINT) AS kv_blocks, l.nixl_backends, l.ucx_tls, l.ucx_net_devices
FROM engine_of AS e LEFT JOIN served AS s USING (engine) LEFT JOIN stepped AS t USING (engine)
  LEFT JOIN moved AS m USING (engine) LEFT JOIN stated AS l USING (engine)
  LEFT JOIN limited AS k USING (engine)
ORDER BY e.engine
