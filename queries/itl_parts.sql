-- What passes the time between tokens, cause by cause.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- mode          VARCHAR  How the KV was handed over.
-- cause         VARCHAR  The cause.
-- class         VARCHAR  The class that it counts for.
-- requests      BIGINT   Requests it took time of.
-- share         DOUBLE   Part of all time between first and last tokens of that mode, 0 to 1.
-- ms_per_token  DOUBLE   Time by the tokens after the first of all requests of that mode, ms.
-- remedy        VARCHAR  What usually helps.
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
  SELECT r.request_key, r.mode FROM request AS r, span
  WHERE ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND (r.start_ns < first_ns OR r.start_ns >= last_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($decode IS NULL OR r.decode_engine = $decode)
), part AS (
  SELECT mode, cause, class, times, total_ns FROM tally, span
  WHERE what = 'pace'
    AND CASE
      WHEN from_ns >= coarse_first_ns AND from_ns < coarse_last_ns THEN window_ns = 1800000000000
      ELSE window_ns = 30000000000 AND from_ns >= first_ns AND from_ns < last_ns
    END
    AND ($mode IS NULL OR mode = $mode) AND ($decode IS NULL OR decode_engine = $decode)
  UNION ALL
  SELECT n.mode, q.cause, q.class, 1, q.duration_ns FROM pace_part AS q JOIN near AS n USING (request_key)
), per_cause AS (
  SELECT mode, cause, class, sum(times)::BIGINT AS requests, sum(total_ns)::DOUBLE AS cause_ns
  FROM part GROUP BY mode, cause, class
), whole AS (
  SELECT mode, sum(cause_ns) AS decode_ns FROM per_cause GROUP BY mode
), made AS (
  SELECT mode, sum(decode_tokens)::DOUBLE AS tokens FROM request
  WHERE decode_tokens IS NOT NULL
    AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($decode IS NULL OR decode_engine = $decode)
  GROUP BY mode
)
SELECT
  c.mode, c.cause, c.class, c.requests, c.cause_ns / nullif(w.decode_ns, 0) AS share,
  c.cause_ns / nullif(m.tokens, 0) / 1e6 AS ms_per_token, v.remedy
FROM per_cause AS c JOIN whole AS w ON w.mode = c.mode JOIN made AS m ON m.mode = c.mode
  LEFT JOIN cause AS v ON v.cause = c.cause
ORDER BY c.mode, c.cause_ns DESC, c.cause
