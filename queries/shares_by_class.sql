-- Where the time to first token went, per class.
--
-- $mode  VARCHAR  Only push, pull, local or unknown; all of them if not given.
--
-- mode      VARCHAR  How the KV was handed over.
-- scope     VARCHAR  Where the first token was seen; scopes do not compare.
-- class     VARCHAR  The class; compute is told apart as run and queue.
-- requests  BIGINT   Requests that got a first token.
-- share     DOUBLE   Part of all their time to first token, 0 to 1.
-- mean_ms   DOUBLE   Mean per request, ms.
-- p50_ms    DOUBLE   Median per request, ms.
-- p90_ms    DOUBLE   90th percentile per request, ms.
-- p99_ms    DOUBLE   99th percentile per request, ms.
WITH answered AS (
  SELECT * FROM request WHERE ttft_ns IS NOT NULL AND ($mode IS NULL OR mode = $mode)
), share_of AS (
  SELECT mode, scope, 1 AS position, 'compute.run' AS class, compute_run_ns AS share_ns, ttft_ns FROM answered
  UNION ALL SELECT mode, scope, 2, 'compute.queue', compute_queue_ns, ttft_ns FROM answered
  UNION ALL SELECT mode, scope, 3, 'coordination', coordination_ns, ttft_ns FROM answered
  UNION ALL SELECT mode, scope, 4, 'transfer', transfer_ns, ttft_ns FROM answered
  UNION ALL SELECT mode, scope, 5, 'unattributed', unattributed_ns, ttft_ns FROM answered
)
SELECT
  mode, scope, class, count(*) AS requests, sum(share_ns)::DOUBLE / nullif(sum(ttft_ns), 0)::DOUBLE AS share,
  avg(share_ns) / 1e6 AS mean_ms, quantile_cont(share_ns, 0.5) / 1e6 AS p50_ms,
  quantile_cont(share_ns, 0.9) / 1e6 AS p90_ms, quantile_cont(share_ns, 0.99) / 1e6 AS p99_ms
FROM share_of
GROUP BY mode, scope, position, class
ORDER BY mode, scope, position
