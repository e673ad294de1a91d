-- Where the time to first token went, per class.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope    VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
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
  SELECT * FROM request
  WHERE ttft_ns IS NOT NULL AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
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
