-- What requests waited for on their way to the first token, cause by cause.
--
-- $mode  VARCHAR  Only push, pull, local or unknown; all of them if not given.
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
  SELECT request_key, mode, scope, ttft_ns FROM request WHERE ttft_ns IS NOT NULL AND ($mode IS NULL OR mode = $mode)
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
