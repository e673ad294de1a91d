-- How many requests waited on either side, as time goes by.
--
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts                     TIMESTAMP WITH TIME ZONE  When the row's time begins.
-- prefill_waiting        DOUBLE                    Mean number of requests on P that no step has worked on yet.
-- decode_waiting_for_kv  DOUBLE                    Mean number of requests on D whose reserved blocks wait for KV.
-- decode_waiting         DOUBLE                    Mean number on D that no step has worked on yet.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns), stay AS (
  SELECT
    p.engine, 'prefill_waiting' AS what, e.request, min(e.t_ns) FILTER (e.stage = 'prefill.enqueued') AS from_ns,
    min(e.t_ns) FILTER (e.stage <> 'prefill.enqueued') AS to_ns
  FROM event AS e JOIN engine_process AS p USING (process)
  WHERE e.stage IN ('prefill.enqueued', 'prefill.scheduled', 'prefill.aborted', 'prefill.finished')
    AND ($prefill IS NULL OR p.engine = $prefill)
  GROUP BY p.engine, e.request
  UNION ALL
  SELECT
    p.engine, 'decode_waiting', e.request, min(e.t_ns) FILTER (e.stage = 'decode.enqueued'),
    min(e.t_ns) FILTER (e.stage <> 'decode.enqueued')
  FROM event AS e JOIN engine_process AS p USING (process)
  WHERE e.stage IN ('decode.enqueued', 'decode.scheduled', 'decode.aborted', 'decode.finished')
    AND ($decode IS NULL OR p.engine = $decode)
  GROUP BY p.engine, e.request
  UNION ALL
  SELECT
    p.engine, 'decode_waiting_for_kv', e.request, min(e.t_ns) FILTER (e.stage = 'decode.allocated' AND e.b > 0),
    min(e.t_ns) FILTER (e.stage <> 'decode.allocated')
  FROM event AS e JOIN engine_process AS p USING (process)
  WHERE e.stage IN ('decode.allocated', 'decode.ready', 'decode.aborted', 'decode.finished', 'decode.load_failed')
    AND ($decode IS NULL OR p.engine = $decode)
  GROUP BY p.engine, e.request
), bounded AS (
  SELECT
    what, greatest(from_ns, coalesce($from_ns, from_ns)) AS from_ns,
    least(coalesce(to_ns, (SELECT max(last_ns) FROM process)), coalesce($to_ns, 9223372036854775807)) AS to_ns
  FROM stay WHERE from_ns IS NOT NULL
), part AS (
  SELECT what, from_ns, to_ns, unnest(range(from_ns // bucket_ns, to_ns // bucket_ns + 1)) AS bucket
  FROM bounded, per WHERE to_ns > from_ns
), weighed AS (
  SELECT
    bucket, what,
    sum(least(to_ns, (bucket + 1) * bucket_ns) - greatest(from_ns, bucket * bucket_ns))::DOUBLE / bucket_ns AS mean
  FROM part, per GROUP BY bucket, what, bucket_ns
)
SELECT
  to_timestamp((bucket * bucket_ns // 1000) / 1e6) AS ts,
  coalesce(max(mean) FILTER (what = 'prefill_waiting'), 0.0) AS prefill_waiting,
  coalesce(max(mean) FILTER (what = 'decode_waiting_for_kv'), 0.0) AS decode_waiting_for_kv,
  coalesce(max(mean) FILTER (what = 'decode_waiting'), 0.0) AS decode_waiting
FROM weighed, per
GROUP BY bucket, bucket_ns
ORDER BY bucket
