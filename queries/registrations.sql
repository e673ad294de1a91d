-- Did D's registrations reach P in time, per pair of engines (push).
--
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- prefill_engine  VARCHAR  Engine id of P.
-- decode_engine   VARCHAR  Engine id of D.
-- requests        BIGINT   Requests with a registration.
-- late            BIGINT   Those whose registration came after P had computed.
-- late_share      DOUBLE   Part that was late, 0 to 1.
-- late_p50_ms     DOUBLE   Median lateness of the late ones, ms.
-- late_max_ms     DOUBLE   Greatest lateness, ms.
-- slack_p50_ms    DOUBLE   Median time by which the others were early, ms.
SELECT
  prefill_engine, decode_engine, count(*) AS requests, count(*) FILTER (registration_late_ns > 0) AS late,
  avg(CASE WHEN registration_late_ns > 0 THEN 1.0 ELSE 0.0 END)::DOUBLE AS late_share,
  quantile_cont(registration_late_ns, 0.5) FILTER (registration_late_ns > 0) / 1e6 AS late_p50_ms,
  max(registration_late_ns) FILTER (registration_late_ns > 0) / 1e6 AS late_max_ms,
  quantile_cont(-registration_late_ns, 0.5) FILTER (registration_late_ns <= 0) / 1e6 AS slack_p50_ms
FROM request
WHERE registration_late_ns IS NOT NULL
  AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
  AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
GROUP BY prefill_engine, decode_engine
ORDER BY late DESC, prefill_engine, decode_engine
