-- How the exchanges of agent metadata between engines went.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine      VARCHAR                   Engine that began it.
-- peer        VARCHAR                   Engine that it was with.
-- rank        BIGINT                    Rank that began it.
-- handshakes  BIGINT                    Handshakes begun.
-- failed      BIGINT                    Those that failed.
-- unfinished  BIGINT                    Those whose end was not seen.
-- p50_ms      DOUBLE                    Median time one took, ms.
-- max_ms      DOUBLE                    The longest, ms.
-- last_at     TIMESTAMP WITH TIME ZONE  When the last one began.
WITH begun AS (
  SELECT
    process, ref AS peer, a AS rank, t_ns,
    lead(t_ns) OVER (PARTITION BY process, ref, a ORDER BY t_ns) AS next_ns
  FROM notable
  WHERE stage = 'handshake.started' AND ($from_ns IS NULL OR t_ns >= $from_ns) AND ($to_ns IS NULL OR t_ns < $to_ns)
), ended AS (
  SELECT process, ref AS peer, a AS rank, t_ns, b AS ok FROM notable WHERE stage = 'handshake.ended'
), paired AS (
  SELECT
    p.engine, b.peer, b.rank, b.t_ns, any_value(e.ok) AS ok, min(e.t_ns) - b.t_ns AS duration_ns
  FROM begun AS b JOIN engine_process AS p USING (process)
    LEFT JOIN ended AS e ON e.process = b.process AND e.peer = b.peer AND e.rank IS NOT DISTINCT FROM b.rank
      AND e.t_ns >= b.t_ns AND (b.next_ns IS NULL OR e.t_ns < b.next_ns)
  WHERE $engine IS NULL OR p.engine = $engine
  GROUP BY p.engine, b.process, b.peer, b.rank, b.t_ns
)
SELECT
  engine, peer, rank, count(*) AS handshakes, count(*) FILTER (ok = 0) AS failed,
  count(*) FILTER (duration_ns IS NULL) AS unfinished, quantile_cont(duration_ns, 0.5) / 1e6 AS p50_ms,
  max(duration_ns) / 1e6 AS max_ms, to_timestamp((max(t_ns) // 1000) / 1e6) AS last_at
FROM paired
GROUP BY engine, peer, rank
ORDER BY max(duration_ns) DESC NULLS LAST, engine, peer, rank
