-- What was done beside the critical path, and how close it came to delaying the first token.
--
-- cause         VARCHAR  The cause.
-- class         VARCHAR  What it would have been charged to on the path.
-- requests      BIGINT   Requests that had it.
-- p50_ms        DOUBLE   Median time it took, ms.
-- p99_ms        DOUBLE   99th percentile of that, ms.
-- slack_p50_ms  DOUBLE   Median of how much longer it could have taken unnoticed, ms.
-- slack_min_ms  DOUBLE   The least of that, ms.
SELECT
  cause, class, count(DISTINCT request_key) AS requests, quantile_cont(duration_ns, 0.5) / 1e6 AS p50_ms,
  quantile_cont(duration_ns, 0.99) / 1e6 AS p99_ms, quantile_cont(slack_ns, 0.5) / 1e6 AS slack_p50_ms,
  min(slack_ns) / 1e6 AS slack_min_ms
FROM hidden
GROUP BY cause, class
ORDER BY sum(duration_ns) DESC, cause
