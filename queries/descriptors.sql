-- How many descriptors and bytes a transfer has, and what each descriptor costs to post.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine                  VARCHAR  Engine id of the side that drives the transfer.
-- descriptors_from        BIGINT   Fewest descriptors of the row.
-- descriptors_to          BIGINT   Most descriptors of the row.
-- transfers               BIGINT   Transfers.
-- moved_mib_p50           DOUBLE   Median of the bytes of a transfer, MiB.
-- kib_per_descriptor      DOUBLE   Bytes by descriptors, KiB.
-- post_p50_us             DOUBLE   Median time that the posting call took, us.
-- post_ns_per_descriptor  DOUBLE   Posting time by descriptors, ns.
-- seen_p50_ms             DOUBLE   Median time from the start of the post to the first sign of completion, ms.
-- gb_per_s_low            DOUBLE   Bytes by that time, GB/s: at least so fast.
WITH sized AS (
  SELECT
    t.*, (1::BIGINT << floor(log2(greatest(t.descriptors, 1)))::INTEGER) AS descriptors_from,
    t.seen_ns - t.post_started_ns AS taken_ns
  FROM transfer AS t
  WHERE t.post_started_ns IS NOT NULL AND t.descriptors IS NOT NULL AND ($engine IS NULL OR t.engine = $engine)
    AND ($from_ns IS NULL OR t.post_started_ns >= $from_ns) AND ($to_ns IS NULL OR t.post_started_ns < $to_ns)
)
SELECT
  engine, descriptors_from, 2 * descriptors_from - 1 AS descriptors_to, count(*) AS transfers,
  quantile_cont(moved_bytes, 0.5) / 1048576 AS moved_mib_p50,
  sum(moved_bytes)::DOUBLE / nullif(sum(descriptors), 0)::DOUBLE / 1024 AS kib_per_descriptor,
  quantile_cont(post_ended_ns - post_started_ns, 0.5) / 1e3 AS post_p50_us,
  sum(post_ended_ns - post_started_ns)::DOUBLE / nullif(sum(descriptors), 0)::DOUBLE AS post_ns_per_descriptor,
  quantile_cont(taken_ns, 0.5) / 1e6 AS seen_p50_ms,
  sum(moved_bytes) FILTER (taken_ns > 0)::DOUBLE / nullif(sum(taken_ns) FILTER (taken_ns > 0), 0)::DOUBLE AS gb_per_s_low
FROM sized
GROUP BY engine, descriptors_from
ORDER BY engine, descriptors_from
