-- Which processes emitted, and how much.
--
-- process       INTEGER                   Number of the process.
-- kind          VARCHAR                   router, api, core or worker.
-- engine        VARCHAR                   Engine id, '' if it is none.
-- role          VARCHAR                   vLLM's kv_role.
-- rank          BIGINT                    Tensor-parallel rank.
-- host          VARCHAR                   Id of its host.
-- pid           BIGINT                    Process id on its host.
-- started       TIMESTAMP WITH TIME ZONE  When it started.
-- events        BIGINT                    Events recorded.
-- lost_records  BIGINT                    Records that it could not keep.
-- last_at       TIMESTAMP WITH TIME ZONE  Its last event.
WITH counted AS (
  SELECT process, sum(events)::BIGINT AS events FROM occurrence GROUP BY process
)
SELECT
  p.process, p.kind, p.engine, p.role, p.rank, p.host, p.pid, p.started, coalesce(c.events, 0) AS events,
  p.lost_records, p.last_at
FROM engine_process AS p LEFT JOIN counted AS c USING (process)
ORDER BY p.process
