-- What requests waited for on their way to the first token, cause by cause, the costliest first.
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
-- cause     VARCHAR  The cause.
-- class     VARCHAR  The class that it counts for.
-- requests  BIGINT   Requests on whose path it lay.
-- share     DOUBLE   Part of the time to first token of all requests of that mode and scope, 0 to 1.
-- total_ms  DOUBLE   Sum over all requests, ms.
-- p50_ms    DOUBLE   Median over the requests on whose path it lay, ms; to 2 % where many requests are.
-- p99_ms    DOUBLE   99th percentile over those, ms; to 2 % where many requests are.
-- remedy    VARCHAR  What usually helps.
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
  SELECT r.request_key, r.mode, r.scope, r.start_ns < first_ns AS is_early FROM request AS r, span
  WHERE r.ttft_ns IS NOT NULL AND ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND (r.start_ns < first_ns OR r.start_ns >= last_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($scope IS NULL OR r.scope = $scope)
    AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
), spent AS (
  SELECT n.mode, n.scope, s.cause, s.class, sum(s.end_ns - s.start_ns)::BIGINT AS ns
  FROM segment AS s JOIN (SELECT * FROM near WHERE is_early) AS n USING (request_key)
  GROUP BY n.mode, n.scope, s.cause, s.class, s.request_key
  UNION ALL
  SELECT n.mode, n.scope, s.cause, s.class, sum(s.end_ns - s.start_ns)::BIGINT
  FROM segment AS s JOIN (SELECT * FROM near WHERE NOT is_early) AS n USING (request_key)
  GROUP BY n.mode, n.scope, s.cause, s.class, s.request_key
), part AS (
  SELECT mode, scope, cause, class, bucket, times, total_ns, least_ns, most_ns FROM tally, span
  WHERE what = 'path'
    AND CASE
      WHEN from_ns >= coarse_first_ns AND from_ns < coarse_last_ns THEN window_ns = 1800000000000
      ELSE window_ns = 30000000000 AND from_ns >= first_ns AND from_ns < last_ns
    END
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
  UNION ALL
  SELECT mode, scope, cause, class, floor(log2(greatest(ns, 1)) * 32)::INTEGER, 1, ns, ns, ns FROM spent
), merged AS (
  SELECT
    mode, scope, cause, class, bucket, sum(times)::BIGINT AS times, sum(total_ns)::BIGINT AS total_ns,
    min(least_ns) AS least_ns, max(most_ns) AS most_ns
  FROM part GROUP BY mode, scope, cause, class, bucket
), ordered AS (
  SELECT
    *, (sum(times) OVER (PARTITION BY mode, scope, cause, class ORDER BY bucket))::BIGINT - times AS before,
    (sum(times) OVER (PARTITION BY mode, scope, cause, class))::BIGINT AS requests
  FROM merged
), ranked AS (
  SELECT *, 0.5::DOUBLE * (requests - 1) AS p50, 0.99::DOUBLE * (requests - 1) AS p99 FROM ordered
), told AS (
  SELECT
    mode, scope, cause, class, requests, sum(total_ns)::DOUBLE AS total_ns, any_value(p50 - floor(p50)) AS p50_past,
    any_value(p99 - floor(p99)) AS p99_past,
    max(CASE WHEN floor(p50) >= before AND floor(p50) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p50) - before) / greatest(times - 1, 1) END) AS p50_ns,
    max(CASE WHEN ceil(p50) >= before AND ceil(p50) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p50) - before) / greatest(times - 1, 1) END) AS p50_next_ns,
    max(CASE WHEN floor(p99) >= before AND floor(p99) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p99) - before) / greatest(times - 1, 1) END) AS p99_ns,
    max(CASE WHEN ceil(p99) >= before AND ceil(p99) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p99) - before) / greatest(times - 1, 1) END) AS p99_next_ns
  FROM ranked GROUP BY mode, scope, cause, class, requests
), whole AS (
  SELECT mode, scope, sum(ttft_ns)::DOUBLE AS ttft_ns FROM request
  WHERE ttft_ns IS NOT NULL AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
  GROUP BY mode, scope
)
SELECT
  t.mode, t.scope, t.cause, t.class, t.requests, t.total_ns / nullif(w.ttft_ns, 0) AS share,
  t.total_ns / 1e6 AS total_ms, (t.p50_ns + (t.p50_next_ns - t.p50_ns) * t.p50_past) / 1e6 AS p50_ms,
  (t.p99_ns + (t.p99_next_ns - t.p99_ns) * t.p99_past) / 1e6 AS p99_ms, c.remedy
FROM told AS t JOIN whole AS w ON w.mode = t.mode AND w.scope = t.scope LEFT JOIN cause AS c ON c.cause = t.cause
ORDER BY t.mode, t.scope, t.total_ns DESC, t.cause
