-- What failed, how often, and where to look.
--
-- $from_ns  BIGINT  Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT  Only what began before this time, unix ns; up to the last if not given.
--
-- kind     VARCHAR                   verdict of a request, or the point that tells of the failure.
-- what     VARCHAR                   The verdict, but of requests under way, or the reason given.
-- engine   VARCHAR                   Engine it happened on; of a verdict, D.
-- count    BIGINT                    How often.
-- last_at  TIMESTAMP WITH TIME ZONE  When it happened last.
-- example  VARCHAR                   A request it happened to.
WITH told AS (
  SELECT
    'verdict' AS kind, verdict AS what, coalesce(decode_engine, '') AS engine, start_ns AS at_ns, request_id AS request
  FROM request ANTI JOIN under_way USING (request_key)
  WHERE verdict IN ('incomplete', 'aborted', 'expired', 'failed', 'recomputed', 'corrupt')
  UNION ALL
  SELECT e.stage::VARCHAR, e.ref, coalesce(p.engine, ''), e.t_ns, e.request
  FROM notable AS e LEFT JOIN engine_process AS p USING (process)
  WHERE e.stage IN ('transfer.failed', 'decode.load_failed', 'notification.orphaned', 'prefill.lease_expired',
      'router.failed', 'client.failed', 'tracing.disabled')
    OR (e.stage = 'handshake.ended' AND e.b = 0)
)
SELECT
  kind, what, engine, count(*) AS count, to_timestamp((max(at_ns) // 1000) / 1e6) AS last_at,
  arg_max(request, at_ns) AS example
FROM told
WHERE ($from_ns IS NULL OR at_ns >= $from_ns) AND ($to_ns IS NULL OR at_ns < $to_ns)
GROUP BY kind, what, engine
ORDER BY count(*) DESC, kind, what, engine
