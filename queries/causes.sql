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
-- p50_ms    DOUBLE   Median over the requests on whose path it lay, ms.
-- p99_ms    DOUBLE   99th percentile over those, ms.
-- remedy    VARCHAR  What usually helps.
WITH answered AS (
  SELECT request_key, mode, scope, ttft_ns FROM request
  WHERE ttft_ns IS NOT NULL AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
), whole AS (
  SELECT mode, scope, sum(ttft_ns)::DOUBLE AS ttft_ns FROM answered GROUP BY mode, scope
), per_request AS (
  SELECT a.mode, a.scope, s.cause, s.class, s.request_key, sum(s.end_ns - s.start_ns)::BIGINT AS cause_ns
  FROM segment AS s JOIN answered AS a USING (request_key)
  GROUP BY a.mode, a.scope, s.cause, s.class, s.request_key
)
SELECT
  p.mode, p.scope, p.cause, p.class, count(*) AS requests,
  sum(p.cause_ns)::DOUBLE / nullif(any_value(w.ttft_ns), 0) AS share,
  sum(p.cause_ns)::DOUBLE / 1e6 AS total_ms, quantile_cont(p.cause_ns, 0.5) / 1e6 AS p50_ms,
  quantile_cont(p.cause_ns, 0.99) / 1e6 AS p99_ms, any_value(c.remedy) AS remedy
FROM per_request AS p JOIN whole AS w ON w.mode = p.mode AND w.scope = p.scope LEFT JOIN cause AS c ON c.cause = p.cause
GROUP BY p.mode, p.scope, p.cause, p.class
ORDER BY p.mode, p.scope, sum(p.cause_ns) DESC, p.cause
