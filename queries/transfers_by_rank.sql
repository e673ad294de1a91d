-- How the transfers of each pair of engines went, rank by rank.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine       VARCHAR  Engine id of the side that drives the transfer.
-- peer         VARCHAR  Engine id of the other side, '' if it was not seen.
-- rank         BIGINT   Rank that drives it.
-- transfers    BIGINT   Transfers posted.
-- failed       BIGINT   Those that failed.
-- moved_mib    DOUBLE   Bytes moved, MiB.
-- post_p50_us  DOUBLE   Median time that the posting call took, us.
-- seen_p50_ms  DOUBLE   Median time from the start of the post to the first sign of completion, ms.
-- seen_p99_ms  DOUBLE   99th percentile of that, ms.
-- last         BIGINT   How often it was its request's last transfer, where there were several.
-- last_share   DOUBLE   Part of those requests, 0 to 1; with n equal ranks about 1/n.
WITH home AS (
  SELECT e.request, max(p.engine) AS engine
  FROM event AS e JOIN engine_process AS p USING (process)
  WHERE e.stage IN ('prefill.enqueued', 'decode.enqueued')
  GROUP BY e.request
), seen AS (
  SELECT
    t.*, coalesce(h.engine, '') AS peer,
    least(t.done_ns, t.probed_ns, CASE WHEN t.done_at_post THEN t.post_ended_ns END) AS seen_ns
  FROM transfer AS t LEFT JOIN home AS h ON h.request = t.remote_request
  WHERE t.post_started_ns IS NOT NULL AND ($engine IS NULL OR t.engine = $engine)
    AND ($from_ns IS NULL OR t.post_started_ns >= $from_ns) AND ($to_ns IS NULL OR t.post_started_ns < $to_ns)
), posted AS (
  SELECT
    *, count(*) OVER (PARTITION BY engine, request) AS siblings,
    max(seen_ns) OVER (PARTITION BY engine, request) AS last_seen_ns
  FROM seen
)
SELECT
  engine, peer, rank, count(*) AS transfers, count(failed_ns) AS failed,
  sum(moved_bytes)::DOUBLE / 1048576 AS moved_mib,
  quantile_cont(post_ended_ns - post_started_ns, 0.5) / 1e3 AS post_p50_us,
  quantile_cont(seen_ns - post_started_ns, 0.5) / 1e6 AS seen_p50_ms,
  quantile_cont(seen_ns - post_started_ns, 0.99) / 1e6 AS seen_p99_ms,
  count(*) FILTER (siblings > 1 AND seen_ns = last_seen_ns) AS last,
  count(*) FILTER (siblings > 1 AND seen_ns = last_seen_ns)
    / nullif(count(DISTINCT request) FILTER (siblings > 1), 0) AS last_share
FROM posted
GROUP BY engine, peer, rank
ORDER BY engine, peer, rank
