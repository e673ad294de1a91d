-- How long KV that had arrived waited to be noticed: how many requests waited how long.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- from_ms   DOUBLE  Shortest wait of the row, ms.
-- to_ms     DOUBLE  The row's waits are shorter than this, ms.
-- requests  BIGINT  Requests that waited so long.
-- share     DOUBLE  Part of all that waited, 0 to 1.
WITH sized AS (
  SELECT pow(2, floor(log2(greatest(detection_ns, 1) / 1e6))) AS from_ms FROM request
  WHERE detection_ns IS NOT NULL
    AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
)
SELECT from_ms, 2 * from_ms AS to_ms, count(*) AS requests, count(*) / sum(count(*)) OVER ()::DOUBLE AS share
FROM sized
GROUP BY from_ms
ORDER BY from_ms
