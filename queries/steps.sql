-- How the engines' steps went, and what the connector took of them on the forward thread.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine            VARCHAR  Engine id.
-- steps             BIGINT   Steps made up.
-- tokens_per_step   DOUBLE   Mean number of tokens.
-- requests_per_step DOUBLE   Mean number of requests.
-- step_p50_ms       DOUBLE   Median time from made up to taken in, ms.
-- step_p99_ms       DOUBLE   99th percentile of that, ms.
-- forward_p50_ms    DOUBLE   Median time from begun to the end of the forward, ms.
-- connector_p50_us  DOUBLE   Median time the connector took on the forward thread, us.
-- connector_p99_us  DOUBLE   99th percentile of that, us.
-- connector_share   DOUBLE   Part of all step time that the connector took, 0 to 1.
-- starved_p99_ms    DOUBLE   99th percentile of how long the scheduler had no processor before a step, ms.
-- starved_s         DOUBLE   Sum of that, s.
-- worker_starved_p99_ms DOUBLE 99th percentile of how long a worker's thread had no processor in a step, ms.
-- worker_starved_s  DOUBLE   Sum of that, s.
WITH told AS (
  SELECT
    engine, count(*) AS steps, avg(tokens) AS tokens_per_step, avg(requests) AS requests_per_step,
    quantile_cont(ended_ns - scheduled_ns, [0.5, 0.99]) AS step,
    quantile_cont(forwarded_ns - started_ns, 0.5) / 1e6 AS forward_p50_ms,
    quantile_cont(connector_ns, [0.5, 0.99]) AS connector,
    sum(connector_ns)::DOUBLE / nullif(sum(ended_ns - scheduled_ns), 0)::DOUBLE AS connector_share,
    quantile_cont(starved_ns, 0.99) / 1e6 AS starved_p99_ms, sum(starved_ns)::DOUBLE / 1e9 AS starved_s,
    quantile_cont(forward_starved_ns + connector_starved_ns + result_starved_ns, 0.99) / 1e6
      AS worker_starved_p99_ms,
    sum(forward_starved_ns + connector_starved_ns + result_starved_ns)::DOUBLE / 1e9 AS worker_starved_s
  FROM step
  WHERE ($engine IS NULL OR engine = $engine)
    AND ($from_ns IS NULL OR coalesce(scheduled_ns, started_ns) >= $from_ns)
    AND ($to_ns IS NULL OR coalesce(scheduled_ns, started_ns) < $to_ns)
  GROUP BY engine
)
SELECT
  engine, steps, tokens_per_step, requests_per_step, step[1] / 1e6 AS step_p50_ms, step[2] / 1e6 AS step_p99_ms,
  forward_p50_ms, connector[1] / 1e3 AS connector_p50_us, connector[2] / 1e3 AS connector_p99_us, connector_share,
  starved_p99_ms, starved_s, worker_starved_p99_ms, worker_starved_s
FROM told
ORDER BY engine
