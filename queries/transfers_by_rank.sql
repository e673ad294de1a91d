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
WITH posted AS (
  SELECT *, siblings > 1 AS has_siblings FROM transfer
  WHERE post_started_ns IS NOT NULL AND ($engine IS NULL OR engine = $engine)
    AND ($from_ns IS NULL OR post_started_ns >= $from_ns) AND ($to_ns IS NULL OR post_started_ns < $to_ns)
), several AS (
  SELECT engine, peer, rank, count(*) FILTER (is_last) AS last, count(DISTINCT request) AS requests
  FROM posted WHERE has_siblings GROUP BY engine, peer, rank
), told AS (
  SELECT
    engine, peer, rank, count(*) AS transfers, count(failed_ns) AS failed,
    sum(moved_bytes)::DOUBLE / 1048576 AS moved_mib,
    quantile_cont(post_ended_ns - post_started_ns, 0.5) / 1e3 AS post_p50_us,
    quantile_cont(seen_ns - post_started_ns, [0.5, 0.99]) AS seen
  FROM posted GROUP BY engine, peer, rank
)
SELECT
  t.engine, t.peer, t.rank, t.transfers, t.failed, t.moved_mib, t.post_p50_us, t.seen[1] / 1e6 AS seen_p50_ms,
  t.seen[2] / 1e6 AS seen_p99_ms, coalesce(s.last, 0) AS last, s.last / s.requests AS last_share
FROM told AS t LEFT JOIN several AS s
  ON s.engine IS NOT DISTINCT FROM t.engine AND s.peer = t.peer AND s.rank IS NOT DISTINCT FROM t.rank
ORDER BY t.engine, t.peer, t.rank
