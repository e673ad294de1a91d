-- How requests ended, as time goes by; those under way have not.
--
-- $mode       VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts          TIMESTAMP WITH TIME ZONE  When the row's time begins.
-- complete    BIGINT                    Requests whose hand-off was whole.
-- incomplete  BIGINT                    Requests of which records are missing.
-- aborted     BIGINT                    Requests that were aborted.
-- expired     BIGINT                    Requests whose blocks P gave up before they were read.
-- failed      BIGINT                    Requests that failed.
-- recomputed  BIGINT                    Requests whose prompt D computed itself.
-- no_handoff  BIGINT                    Requests without a hand-off.
-- corrupt     BIGINT                    Requests for which D went on from other KV than P had computed.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns)
SELECT
  to_timestamp((start_ns // bucket_ns * bucket_ns // 1000) / 1e6) AS ts,
  count(*) FILTER (verdict = 'complete') AS complete, count(*) FILTER (verdict = 'incomplete') AS incomplete,
  count(*) FILTER (verdict = 'aborted') AS aborted, count(*) FILTER (verdict = 'expired') AS expired,
  count(*) FILTER (verdict = 'failed') AS failed, count(*) FILTER (verdict = 'recomputed') AS recomputed,
  count(*) FILTER (verdict = 'no handoff') AS no_handoff,
  count(*) FILTER (verdict = 'corrupt') AS corrupt
FROM request ANTI JOIN under_way USING (request_key), per
WHERE ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
  AND ($mode IS NULL OR mode = $mode)
  AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
GROUP BY ts
ORDER BY ts
