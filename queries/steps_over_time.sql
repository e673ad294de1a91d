-- How long steps took and what the connector took of them on the forward thread, as time goes by.
--
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts                    TIMESTAMP WITH TIME ZONE  When the row's time begins.
-- prefill_step_p50_ms   DOUBLE                    Median step with tokens of engines that prefill, ms.
-- decode_step_p50_ms    DOUBLE                    The same of engines that decode, ms.
-- decode_step_p99_ms    DOUBLE                    99th percentile of that, ms.
-- prefill_connector_ms  DOUBLE                    Mean time of the connector on P's forward thread per step, ms.
-- decode_connector_ms   DOUBLE                    The same on D, ms.
-- prefill_requests      DOUBLE                    Mean number of requests in a step of engines that prefill.
-- decode_requests       DOUBLE                    The same of engines that decode.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns), side AS (
  SELECT prefill_engine AS engine, 'prefill' AS side FROM request WHERE prefill_engine <> ''
  UNION SELECT decode_engine, 'decode' FROM request WHERE decode_engine <> ''
), sided AS (
  SELECT
    d.side, coalesce(s.scheduled_ns, s.started_ns) AS at_ns, s.scheduled_ns, s.ended_ns, s.connector_ns, s.requests
  FROM step AS s JOIN side AS d USING (engine)
  WHERE s.tokens > 0
    AND ($from_ns IS NULL OR coalesce(s.scheduled_ns, s.started_ns) >= $from_ns)
    AND ($to_ns IS NULL OR coalesce(s.scheduled_ns, s.started_ns) < $to_ns)
    AND (d.side <> 'prefill' OR $prefill IS NULL OR s.engine = $prefill)
    AND (d.side <> 'decode' OR $decode IS NULL OR s.engine = $decode)
), told AS (
  SELECT
    side, at_ns // bucket_ns AS bucket, quantile_cont(ended_ns - scheduled_ns, [0.5, 0.99]) AS step,
    avg(connector_ns) AS connector_ns, avg(requests) AS requests
  FROM sided, per
  GROUP BY side, bucket
)
SELECT
  to_timestamp((bucket * bucket_ns // 1000) / 1e6) AS ts,
  any_value(step[1]) FILTER (side = 'prefill') / 1e6 AS prefill_step_p50_ms,
  any_value(step[1]) FILTER (side = 'decode') / 1e6 AS decode_step_p50_ms,
  any_value(step[2]) FILTER (side = 'decode') / 1e6 AS decode_step_p99_ms,
  any_value(connector_ns) FILTER (side = 'prefill') / 1e6 AS prefill_connector_ms,
  any_value(connector_ns) FILTER (side = 'decode') / 1e6 AS decode_connector_ms,
  any_value(requests) FILTER (side = 'prefill') AS prefill_requests,
  any_value(requests) FILTER (side = 'decode') AS decode_requests
FROM told, per
GROUP BY bucket, bucket_ns
ORDER BY bucket
