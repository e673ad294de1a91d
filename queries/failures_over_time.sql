-- How many requests of each pair of engines went wrong, as time goes by; those under way have not ended.
--
-- $mode       VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts               TIMESTAMP WITH TIME ZONE  When the row's time begins.
-- prefill_engine   VARCHAR                   Engine id of P.
-- decode_engine    VARCHAR                   Engine id of D.
-- requests         BIGINT                    Requests of the pair that began then.
-- failed_requests  BIGINT                    Those of another verdict than complete and no handoff.
-- failed_share     DOUBLE                    Part of them, 0 to 1.
-- transfers        BIGINT                    Transfers that all of them took.
-- verdict          VARCHAR                   The verdict that most of the failed ones have; NULL if none failed.
-- example          VARCHAR                   The first of those that failed.
WITH ended AS (
  SELECT
    *, verdict NOT IN ('complete', 'no handoff') AS is_failed,
    start_ns // greatest(coalesce($bucket_ns, 60000000000), 1) * greatest(coalesce($bucket_ns, 60000000000), 1) AS from_ns
  FROM request ANTI JOIN under_way USING (request_key)
  WHERE ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
)
SELECT
  to_timestamp((from_ns // 1000) / 1e6) AS ts, prefill_engine, decode_engine, count(*) AS requests,
  count(*) FILTER (is_failed) AS failed_requests, count(*) FILTER (is_failed) / count(*) AS failed_share,
  coalesce(sum(transfers), 0)::BIGINT AS transfers, mode(verdict) FILTER (is_failed) AS verdict,
  arg_min(request_id, start_ns) FILTER (is_failed) AS example
FROM ended
GROUP BY from_ns, prefill_engine, decode_engine
ORDER BY from_ns, prefill_engine, decode_engine
