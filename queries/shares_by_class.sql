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
), summed AS (
  SELECT
    mode, scope, count(*) AS requests, nullif(sum(ttft_ns), 0)::DOUBLE AS ttft_ns,
    [sum(compute_run_ns)::DOUBLE, sum(compute_queue_ns)::DOUBLE, sum(coordination_ns)::DOUBLE,
      sum(transfer_ns)::DOUBLE, sum(unattributed_ns)::DOUBLE] AS total_ns,
    [quantile_cont(compute_run_ns, [0.5, 0.9, 0.99]), quantile_cont(compute_queue_ns, [0.5, 0.9, 0.99]),
      quantile_cont(coordination_ns, [0.5, 0.9, 0.99]), quantile_cont(transfer_ns, [0.5, 0.9, 0.99]),
      quantile_cont(unattributed_ns, [0.5, 0.9, 0.99])] AS quantile_ns
  FROM answered GROUP BY mode, scope
), named AS (
  SELECT
    unnest([1, 2, 3, 4, 5]) AS position,
    unnest(['compute.run', 'compute.queue', 'coordination', 'transfer', 'unattributed']) AS class
)
SELECT
  mode, scope, class, requests, total_ns[position] / ttft_ns AS share, total_ns[position] / requests / 1e6 AS mean_ms,
  quantile_ns[position][1] / 1e6 AS p50_ms, quantile_ns[position][2] / 1e6 AS p90_ms,
  quantile_ns[position][3] / 1e6 AS p99_ms
FROM summed, named
ORDER BY mode, scope, position
