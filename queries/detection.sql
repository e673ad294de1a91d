-- How long KV that had arrived waited to be noticed, against the steps of the engine that notices.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- mode                 VARCHAR  How the KV was handed over.
-- decode_engine        VARCHAR  Engine id of D.
-- requests             BIGINT   Requests that waited for it on their way to the first token.
-- detection_p50_ms     DOUBLE   Median of that wait, ms.
-- detection_p99_ms     DOUBLE   99th percentile of it, ms.
-- bracket_p50_ms       DOUBLE   Median of the time in which the end of the wire lies hidden, ms.
-- step_p50_ms          DOUBLE   Median time from one step of D to its next, ms; NULL if none was seen.
-- steps_p50            DOUBLE   The median wait in such steps: about 0.5 where somebody looks once a step.
-- within_a_step_share  DOUBLE   Part that waited no longer than one step, 0 to 1.
WITH spent AS (
  SELECT mode, decode_engine, detection_ns, transfer_high_ns - transfer_low_ns AS bracket_ns FROM request
  WHERE detection_ns IS NOT NULL
    AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
), paced AS (
  SELECT engine, quantile_cont(gap_ns, 0.5) AS step_ns FROM step
  WHERE scheduled_ns IS NOT NULL AND engine IN (SELECT DISTINCT decode_engine FROM spent)
  GROUP BY engine
)
SELECT
  mode, decode_engine, count(*) AS requests, quantile_cont(detection_ns, 0.5) / 1e6 AS detection_p50_ms,
  quantile_cont(detection_ns, 0.99) / 1e6 AS detection_p99_ms,
  quantile_cont(bracket_ns, 0.5) / 1e6 AS bracket_p50_ms,
  any_value(step_ns) / 1e6 AS step_p50_ms,
  quantile_cont(detection_ns, 0.5) / nullif(any_value(step_ns), 0) AS steps_p50,
  avg(CASE WHEN detection_ns <= step_ns THEN 1.0 WHEN step_ns IS NOT NULL THEN 0.0 END)::DOUBLE AS within_a_step_share
FROM spent LEFT JOIN paced ON paced.engine = spent.decode_engine
GROUP BY mode, decode_engine
ORDER BY mode, decode_engine
