-- What hand-offs keep occupied: blocks reserved on D before the KV is there, blocks held on P until it is taken.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- mode                            VARCHAR  How the KV was handed over.
-- requests                        BIGINT   Requests that reserved or held blocks.
-- reserved_block_seconds          DOUBLE   Blocks on D times the seconds for which they waited for KV.
-- reserved_p50_ms                 DOUBLE   Median of how long they waited, ms.
-- reserved_p99_ms                 DOUBLE   99th percentile of that, ms.
-- held_block_seconds              DOUBLE   Blocks on P times the seconds for which they were kept after P had finished.
-- held_p50_ms                     DOUBLE   Median of how long they were kept, ms.
-- held_p99_ms                     DOUBLE   99th percentile of that, ms.
-- held_after_end_block_seconds    DOUBLE   The part of it after the request was over: aborted or failed.
SELECT
  mode, count(*) AS requests,
  coalesce(sum(reserved_blocks::DOUBLE * reserved_ns), 0.0) / 1e9 AS reserved_block_seconds,
  quantile_cont(reserved_ns, 0.5) / 1e6 AS reserved_p50_ms, quantile_cont(reserved_ns, 0.99) / 1e6 AS reserved_p99_ms,
  coalesce(sum(held_blocks::DOUBLE * held_ns), 0.0) / 1e9 AS held_block_seconds,
  quantile_cont(held_ns, 0.5) / 1e6 AS held_p50_ms, quantile_cont(held_ns, 0.99) / 1e6 AS held_p99_ms,
  coalesce(sum(held_blocks::DOUBLE * held_after_end_ns), 0.0) / 1e9 AS held_after_end_block_seconds
FROM request
WHERE (reserved_blocks > 0 OR held_blocks > 0)
  AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
  AND ($mode IS NULL OR mode = $mode)
  AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
GROUP BY mode
ORDER BY mode
