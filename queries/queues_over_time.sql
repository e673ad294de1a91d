-- How many requests waited on either side, as time goes by.
--
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts                     TIMESTAMP WITH TIME ZONE  When the row's time begins; means are over what of it lies in the run, and in what was asked for. Rows are longer where there would be more than 10,000.
-- prefill_waiting        DOUBLE                    Mean number of requests on P that no step has worked on yet.
-- decode_waiting_for_kv  DOUBLE                    Mean number of requests on D whose reserved blocks wait for KV.
-- decode_waiting         DOUBLE                    Mean number on D that no step has worked on yet.
WITH span AS (
  SELECT
    least(min(prefill_from_ns), min(kv_from_ns), min(decode_from_ns), any_value(begun_ns)) AS first_ns,
    greatest(
      max(prefill_to_ns), max(kv_to_ns), max(decode_to_ns), any_value(over_ns),
      CASE WHEN count(prefill_from_ns) > count(prefill_to_ns) OR count(kv_from_ns) > count(kv_to_ns)
        OR count(decode_from_ns) > count(decode_to_ns) THEN (SELECT max(last_ns) FROM process) END
    ) AS last_ns
  FROM (
    SELECT min(start_ns) AS begun_ns, max(coalesce(end_ns, first_token_ns, start_ns)) AS over_ns FROM request
  ) LEFT JOIN leg ON true
), per AS (
  SELECT
    greatest(
      coalesce($bucket_ns, 60000000000), 1,
      (least(last_ns, coalesce($to_ns, last_ns)) - greatest(first_ns, coalesce($from_ns, first_ns))) // 10000
    ) AS bucket_ns
  FROM span
), stay AS NOT MATERIALIZED (
  SELECT 1::TINYINT AS what, prefill_from_ns AS from_ns, prefill_to_ns AS to_ns FROM leg
  WHERE prefill_from_ns IS NOT NULL AND ($prefill IS NULL OR engine = $prefill)
  UNION ALL
  SELECT 2::TINYINT, kv_from_ns, kv_to_ns FROM leg
  WHERE kv_from_ns IS NOT NULL AND ($decode IS NULL OR engine = $decode)
  UNION ALL
  SELECT 3::TINYINT, decode_from_ns, decode_to_ns FROM leg
  WHERE decode_from_ns IS NOT NULL AND ($decode IS NULL OR engine = $decode)
), bounded AS NOT MATERIALIZED (
  SELECT
    what, greatest(from_ns, coalesce($from_ns, from_ns)) AS from_ns,
    least(coalesce(to_ns, (SELECT max(last_ns) FROM process), from_ns), coalesce($to_ns, 9223372036854775807)) AS to_ns
  FROM stay
), changed AS (
  SELECT
    what, from_ns // bucket_ns AS bucket, count(*) AS more, sum(from_ns % bucket_ns) AS missed_ns
  FROM bounded, per WHERE to_ns > from_ns GROUP BY what, from_ns // bucket_ns
  UNION ALL
  SELECT what, to_ns // bucket_ns, -count(*), -sum(to_ns % bucket_ns)
  FROM bounded, per WHERE to_ns > from_ns GROUP BY what, to_ns // bucket_ns
), summed AS (
  SELECT what, bucket, sum(more)::BIGINT AS more, sum(missed_ns) AS missed_ns FROM changed GROUP BY what, bucket
), running AS (
  SELECT
    what, bucket, missed_ns, (sum(more) OVER (PARTITION BY what ORDER BY bucket))::BIGINT AS waiting,
    lead(bucket) OVER (PARTITION BY what ORDER BY bucket) AS next
  FROM summed
), weighed AS (
  SELECT what, bucket, (waiting::HUGEINT * bucket_ns - missed_ns)::DOUBLE AS sum_ns FROM running, per
  UNION ALL
  SELECT what, unnest(range(bucket + 1, next)), waiting::DOUBLE * bucket_ns FROM running, per
  WHERE waiting > 0 AND next > bucket + 1
), told AS (
  SELECT
    bucket * bucket_ns AS at_ns, what,
    sum_ns / nullif(
      least((bucket + 1) * bucket_ns, last_ns, $to_ns) - greatest(bucket * bucket_ns, first_ns, $from_ns), 0
    ) AS mean
  FROM weighed, per, span
)
SELECT
  to_timestamp((at_ns // 1000) / 1e6) AS ts, coalesce(max(mean) FILTER (what = 1), 0.0) AS prefill_waiting,
  coalesce(max(mean) FILTER (what = 2), 0.0) AS decode_waiting_for_kv,
  coalesce(max(mean) FILTER (what = 3), 0.0) AS decode_waiting
FROM told
GROUP BY at_ns
ORDER BY at_ns
