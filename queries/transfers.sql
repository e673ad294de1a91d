-- How the transfers went, per engine that drives them.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine              VARCHAR  Engine id of the side that drives the transfer.
-- transfers           BIGINT   Transfers posted.
-- failed              BIGINT   Those that failed.
-- unfinished          BIGINT   Those that nobody saw done or failed.
-- moved_mib           DOUBLE   Bytes moved, MiB.
-- descriptors_p50     DOUBLE   Median number of descriptors.
-- post_p50_us         DOUBLE   Median time that the posting call took, us.
-- post_p99_us         DOUBLE   99th percentile of that, us.
-- done_at_post_share  DOUBLE   Part that the posting call already found done, 0 to 1.
-- bracket_p50_ms      DOUBLE   Median time in which the end of the wire lies hidden, ms: the polls' own spacing.
-- seen_p50_ms         DOUBLE   Median time from the start of the post to the first sign of completion, ms.
-- seen_p99_ms         DOUBLE   99th percentile of that, ms.
WITH posted AS (
  SELECT
    *,
    -- The last descriptor is posted when the call returns.
    greatest(last_pending_ns, probe_pending_ns, CASE WHEN seen_ns >= post_ended_ns THEN post_ended_ns ELSE post_started_ns END)
      AS pending_ns
  FROM transfer
  WHERE post_started_ns IS NOT NULL AND ($engine IS NULL OR engine = $engine)
    AND ($from_ns IS NULL OR post_started_ns >= $from_ns) AND ($to_ns IS NULL OR post_started_ns < $to_ns)
)
SELECT
  engine, count(*) AS transfers, count(failed_ns) AS failed,
  count(*) FILTER (seen_ns IS NULL AND failed_ns IS NULL) AS unfinished,
  sum(moved_bytes)::DOUBLE / 1048576 AS moved_mib, quantile_cont(descriptors, 0.5)::DOUBLE AS descriptors_p50,
  quantile_cont(post_ended_ns - post_started_ns, 0.5) / 1e3 AS post_p50_us,
  quantile_cont(post_ended_ns - post_started_ns, 0.99) / 1e3 AS post_p99_us,
  avg(CASE WHEN done_at_post THEN 1.0 ELSE 0.0 END)::DOUBLE AS done_at_post_share,
  quantile_cont(seen_ns - pending_ns, 0.5) / 1e6 AS bracket_p50_ms,
  quantile_cont(seen_ns - post_started_ns, 0.5) / 1e6 AS seen_p50_ms,
  quantile_cont(seen_ns - post_started_ns, 0.99) / 1e6 AS seen_p99_ms
FROM posted
GROUP BY engine
ORDER BY engine
