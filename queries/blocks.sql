-- What hand-offs keep occupied: blocks reserved on D before the KV is there, blocks held on P until it is taken.
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
WHERE reserved_blocks > 0 OR held_blocks > 0
GROUP BY mode
ORDER BY mode
