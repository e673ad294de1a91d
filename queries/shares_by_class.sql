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
-- p50_ms    DOUBLE   Median per request, ms; to 2 % where many requests are.
-- p90_ms    DOUBLE   90th percentile per request, ms; to 2 % where many requests are.
-- p99_ms    DOUBLE   99th percentile per request, ms; to 2 % where many requests are.
WITH counted AS (
  SELECT
    coalesce(max(from_ns + window_ns) FILTER (window_ns = 30000000000), 0) AS fine_ns,
    coalesce(max(from_ns + window_ns) FILTER (window_ns = 1800000000000), 0) AS coarse_ns
  FROM tally
), span AS (
  SELECT
    (coalesce($from_ns, 0) + 29999999999) // 30000000000 * 30000000000 AS first_ns,
    least(coalesce($to_ns, 9223372036854775807) // 30000000000 * 30000000000, fine_ns) AS last_ns,
    (coalesce($from_ns, 0) + 1799999999999) // 1800000000000 * 1800000000000 AS coarse_first_ns,
    least(coalesce($to_ns, 9223372036854775807) // 1800000000000 * 1800000000000, coarse_ns) AS coarse_last_ns
  FROM counted
), near AS (
  SELECT
    r.mode, r.scope, unnest(['compute.run', 'compute.queue', 'coordination', 'transfer', 'unattributed']) AS class,
    unnest([r.compute_run_ns, r.compute_queue_ns, r.coordination_ns, r.transfer_ns, r.unattributed_ns]) AS ns
  FROM request AS r, span
  WHERE r.ttft_ns IS NOT NULL AND ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND (r.start_ns < first_ns OR r.start_ns >= last_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($scope IS NULL OR r.scope = $scope)
    AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
), part AS (
  SELECT mode, scope, class, bucket, times, total_ns, least_ns, most_ns FROM tally, span
  WHERE what = 'share'
    AND CASE
      WHEN from_ns >= coarse_first_ns AND from_ns < coarse_last_ns THEN window_ns = 1800000000000
      ELSE window_ns = 30000000000 AND from_ns >= first_ns AND from_ns < last_ns
    END
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
  UNION ALL
  SELECT mode, scope, class, floor(log2(greatest(ns, 1)) * 32)::INTEGER, 1, ns, ns, ns FROM near
), merged AS (
  SELECT
    mode, scope, class, bucket, sum(times)::BIGINT AS times, sum(total_ns)::BIGINT AS total_ns,
    min(least_ns) AS least_ns, max(most_ns) AS most_ns
  FROM part GROUP BY mode, scope, class, bucket
), ordered AS (
  SELECT
    *, (sum(times) OVER (PARTITION BY mode, scope, class ORDER BY bucket))::BIGINT - times AS before,
    (sum(times) OVER (PARTITION BY mode, scope, class))::BIGINT AS requests
  FROM merged
), ranked AS (
  SELECT
    *, 0.5::DOUBLE * (requests - 1) AS p50, 0.9::DOUBLE * (requests - 1) AS p90, 0.99::DOUBLE * (requests - 1) AS p99
  FROM ordered
), told AS (
  SELECT
    mode, scope, class, requests, sum(total_ns)::DOUBLE AS total_ns, any_value(p50 - floor(p50)) AS p50_past,
    any_value(p90 - floor(p90)) AS p90_past, any_value(p99 - floor(p99)) AS p99_past,
    max(CASE WHEN floor(p50) >= before AND floor(p50) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p50) - before) / greatest(times - 1, 1) END) AS p50_ns,
    max(CASE WHEN ceil(p50) >= before AND ceil(p50) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p50) - before) / greatest(times - 1, 1) END) AS p50_next_ns,
    max(CASE WHEN floor(p90) >= before AND floor(p90) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p90) - before) / greatest(times - 1, 1) END) AS p90_ns,
    max(CASE WHEN ceil(p90) >= before AND ceil(p90) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p90) - before) / greatest(times - 1, 1) END) AS p90_next_ns,
    max(CASE WHEN floor(p99) >= before AND floor(p99) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p99) - before) / greatest(times - 1, 1) END) AS p99_ns,
    max(CASE WHEN ceil(p99) >= before AND ceil(p99) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p99) - before) / greatest(times - 1, 1) END) AS p99_next_ns
  FROM ranked GROUP BY mode, scope, class, requests
)
SELECT
  mode, scope, class, requests,
  total_ns / nullif(sum(total_ns) OVER (PARTITION BY mode, scope), 0) AS share, total_ns / requests / 1e6 AS mean_ms,
  (p50_ns + (p50_next_ns - p50_ns) * p50_past) / 1e6 AS p50_ms,
  (p90_ns + (p90_next_ns - p90_ns) * p90_past) / 1e6 AS p90_ms,
  (p99_ns + (p99_next_ns - p99_ns) * p99_past) / 1e6 AS p99_ms
FROM told
ORDER BY
  mode, scope, list_position(['compute.run', 'compute.queue', 'coordination', 'transfer', 'unattributed'], class)
