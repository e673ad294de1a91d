-- What was done beside the critical path, and how close it came to delaying the first token.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- cause         VARCHAR  The cause.
-- class         VARCHAR  What it would have been charged to on the path.
-- requests      BIGINT   Requests that had it.
-- p50_ms        DOUBLE   Median time it took, ms; to 2 % where many requests are.
-- p99_ms        DOUBLE   99th percentile of that, ms; to 2 % where many requests are.
-- slack_p50_ms  DOUBLE   Median of how much longer it could have taken unnoticed, ms; to 2 % where many requests are.
-- slack_min_ms  DOUBLE   The least of that, ms.
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
  SELECT r.request_key FROM request AS r, span
  WHERE ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND (r.start_ns < first_ns OR r.start_ns >= last_ns)
    AND ($mode IS NULL OR r.mode = $mode)
    AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
), beside AS (
  SELECT
    h.cause, h.class, h.duration_ns, h.slack_ns,
    row_number() OVER (PARTITION BY h.request_key, h.cause, h.class ORDER BY h.start_ns) = 1 AS is_first
  FROM hidden AS h JOIN near USING (request_key)
), part AS (
  SELECT what, cause, class, bucket, times, requests, total_ns, least_ns, most_ns FROM tally, span
  WHERE what IN ('hidden', 'slack')
    AND CASE
      WHEN from_ns >= coarse_first_ns AND from_ns < coarse_last_ns THEN window_ns = 1800000000000
      ELSE window_ns = 30000000000 AND from_ns >= first_ns AND from_ns < last_ns
    END
    AND ($mode IS NULL OR mode = $mode)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
  UNION ALL
  SELECT
    'hidden', cause, class, floor(log2(greatest(duration_ns, 1)) * 32)::INTEGER, 1, is_first::INTEGER, duration_ns,
    duration_ns, duration_ns
  FROM beside
  UNION ALL
  SELECT 'slack', cause, class, floor(log2(greatest(slack_ns, 1)) * 32)::INTEGER, 1, 0, slack_ns, slack_ns, slack_ns
  FROM beside WHERE slack_ns IS NOT NULL
), merged AS (
  SELECT
    what, cause, class, bucket, sum(times)::BIGINT AS times, sum(requests)::BIGINT AS requests,
    sum(total_ns)::BIGINT AS total_ns, min(least_ns) AS least_ns, max(most_ns) AS most_ns
  FROM part GROUP BY what, cause, class, bucket
), ordered AS (
  SELECT
    *, (sum(times) OVER (PARTITION BY what, cause, class ORDER BY bucket))::BIGINT - times AS before,
    (sum(times) OVER (PARTITION BY what, cause, class))::BIGINT - 1 AS last
  FROM merged
), ranked AS (
  SELECT *, 0.5::DOUBLE * last AS p50, 0.99::DOUBLE * last AS p99 FROM ordered
), told AS (
  SELECT
    what, cause, class, sum(requests)::BIGINT AS requests, sum(total_ns)::DOUBLE AS total_ns,
    min(least_ns) AS least_ns, any_value(p50 - floor(p50)) AS p50_past, any_value(p99 - floor(p99)) AS p99_past,
    max(CASE WHEN floor(p50) >= before AND floor(p50) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p50) - before) / greatest(times - 1, 1) END) AS p50_ns,
    max(CASE WHEN ceil(p50) >= before AND ceil(p50) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p50) - before) / greatest(times - 1, 1) END) AS p50_next_ns,
    max(CASE WHEN floor(p99) >= before AND floor(p99) < before + times THEN least_ns + (most_ns - least_ns) * (floor(p99) - before) / greatest(times - 1, 1) END) AS p99_ns,
    max(CASE WHEN ceil(p99) >= before AND ceil(p99) < before + times THEN least_ns + (most_ns - least_ns) * (ceil(p99) - before) / greatest(times - 1, 1) END) AS p99_next_ns
  FROM ranked GROUP BY what, cause, class
), shown AS (
  SELECT
    *, (p50_ns + (p50_next_ns - p50_ns) * p50_past) / 1e6 AS p50_ms,
    (p99_ns + (p99_next_ns - p99_ns) * p99_past) / 1e6 AS p99_ms
  FROM told
)
SELECT
  h.cause, h.class, h.requests, h.p50_ms, h.p99_ms, s.p50_ms AS slack_p50_ms, s.least_ns / 1e6 AS slack_min_ms
FROM shown AS h LEFT JOIN shown AS s ON s.what = 'slack' AND s.cause = h.cause AND s.class = h.class
WHERE h.what = 'hidden'
ORDER BY h.total_ns DESC, h.cause
