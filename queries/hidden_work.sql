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
-- p50_ms        DOUBLE   Median time it took, ms.
-- p99_ms        DOUBLE   99th percentile of that, ms.
-- slack_p50_ms  DOUBLE   Median of how much longer it could have taken unnoticed, ms.
-- slack_min_ms  DOUBLE   The least of that, ms.
SELECT
  h.cause, h.class, count(DISTINCT h.request_key) AS requests, quantile_cont(h.duration_ns, 0.5) / 1e6 AS p50_ms,
  quantile_cont(h.duration_ns, 0.99) / 1e6 AS p99_ms, quantile_cont(h.slack_ns, 0.5) / 1e6 AS slack_p50_ms,
  min(h.slack_ns) / 1e6 AS slack_min_ms
FROM hidden AS h JOIN request AS r USING (request_key)
WHERE ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
  AND ($mode IS NULL OR r.mode = $mode)
  AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
GROUP BY h.cause, h.class
ORDER BY sum(h.duration_ns) DESC, h.cause
