-- How the tokens after the first came, as time goes by.
--
-- $mode       VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts                      TIMESTAMP WITH TIME ZONE  When the row's time begins.
-- requests                BIGINT                    Requests that began then and got a second token.
-- tpot_p50_ms             DOUBLE                    Median time per token after the first, ms.
-- tpot_p99_ms             DOUBLE                    99th percentile of that, ms.
-- itl_max_p99_ms          DOUBLE                    99th percentile of the longest pause between tokens, ms.
-- extension_us_per_token  DOUBLE                    By how much the connector made a token later, us.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns)
SELECT
  to_timestamp((r.start_ns // bucket_ns * bucket_ns // 1000) / 1e6) AS ts, count(*) AS requests,
  quantile_cont(p.tpot_ns, 0.5) / 1e6 AS tpot_p50_ms,
  quantile_cont(p.tpot_ns, 0.99) / 1e6 AS tpot_p99_ms, quantile_cont(p.itl_max_ns, 0.99) / 1e6 AS itl_max_p99_ms,
  sum(p.extension_ns)::DOUBLE / nullif(sum(p.tokens), 0)::DOUBLE / 1e3 AS extension_us_per_token
FROM pace AS p JOIN request AS r USING (request_key) CROSS JOIN per
WHERE p.tpot_ns IS NOT NULL
  AND ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
  AND ($mode IS NULL OR r.mode = $mode) AND ($decode IS NULL OR r.decode_engine = $decode)
GROUP BY ts
ORDER BY ts
