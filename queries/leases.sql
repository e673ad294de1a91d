-- How long P held blocks for hand-offs, and which leases ran out.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine          VARCHAR  Engine id of P.
-- leases          BIGINT   Leases begun, one per rank.
-- extensions      BIGINT   Extensions by a heartbeat from D.
-- expired         BIGINT   Leases that ran out with the blocks unread.
-- expired_share   DOUBLE   Part of the leases, 0 to 1.
-- lease_s         DOUBLE   Median length that P granted, s.
-- held_p50_ms     DOUBLE   Median time for which blocks were held after P had finished, ms.
-- held_max_ms     DOUBLE   The longest, ms.
-- never_released  BIGINT   Requests whose blocks were not seen to be let go.
WITH told AS (
  SELECT
    p.engine, count(*) FILTER (e.stage = 'prefill.lease_started') AS leases,
    count(*) FILTER (e.stage = 'prefill.lease_extended') AS extensions,
    count(*) FILTER (e.stage = 'prefill.lease_expired') AS expired,
    quantile_cont(e.b, 0.5) FILTER (e.stage = 'prefill.lease_started' AND e.b > 0) AS lease_ns
  FROM notable AS e JOIN engine_process AS p USING (process)
  WHERE e.stage IN ('prefill.lease_started', 'prefill.lease_extended', 'prefill.lease_expired')
    AND ($from_ns IS NULL OR e.t_ns >= $from_ns) AND ($to_ns IS NULL OR e.t_ns < $to_ns)
  GROUP BY p.engine
), held AS (
  SELECT
    prefill_engine AS engine, quantile_cont(held_ns, 0.5) AS p50_ns, max(held_ns) AS max_ns,
    count(*) FILTER (held_ns IS NULL) AS never_released
  FROM request
  WHERE held_blocks > 0 AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
  GROUP BY prefill_engine
)
SELECT
  engine, coalesce(t.leases, 0) AS leases, coalesce(t.extensions, 0) AS extensions, coalesce(t.expired, 0) AS expired,
  t.expired / nullif(t.leases, 0) AS expired_share, t.lease_ns / 1e9 AS lease_s, h.p50_ns / 1e6 AS held_p50_ms,
  h.max_ns / 1e6 AS held_max_ms, coalesce(h.never_released, 0) AS never_released
FROM told AS t FULL JOIN held AS h USING (engine)
WHERE $engine IS NULL OR engine = $engine
ORDER BY expired DESC, engine
