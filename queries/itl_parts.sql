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
WITH paced AS (
  SELECT r.mode, p.request_key, p.tokens, p.end_ns - p.start_ns AS decode_ns
  FROM pace AS p JOIN request AS r USING (request_key)
  WHERE ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($decode IS NULL OR r.decode_engine = $decode)
), whole AS (
  SELECT mode, sum(decode_ns)::DOUBLE AS decode_ns, sum(tokens)::DOUBLE AS tokens FROM paced GROUP BY mode
), per_cause AS (
  SELECT d.mode, q.cause, q.class, count(*) AS requests, sum(q.duration_ns)::DOUBLE AS cause_ns
  FROM pace_part AS q JOIN paced AS d USING (request_key) GROUP BY d.mode, q.cause, q.class
)
SELECT
  c.mode, c.cause, c.class, c.requests, c.cause_ns / nullif(w.decode_ns, 0) AS share,
  c.cause_ns / nullif(w.tokens, 0) / 1e6 AS ms_per_token, v.remedy
FROM per_cause AS c JOIN whole AS w ON w.mode = c.mode LEFT JOIN cause AS v ON v.cause = c.cause
ORDER BY c.mode, c.cause_ns DESC, c.cause
