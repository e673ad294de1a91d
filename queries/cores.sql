-- How often the forward thread of a worker shared its core with another busy thread of its process.
--
-- $engine   VARCHAR  Only this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- engine        VARCHAR  Engine id.
-- rank          BIGINT   Rank of the worker, NULL where it has none.
-- looks         BIGINT   Looks at its threads, one in each second in which it made a step.
-- shared        BIGINT   Those at which another thread ran, or could run, on the forward thread's CPU.
-- shared_share  DOUBLE   Part of the looks, 0 to 1.
-- beside_most   BIGINT   The most other threads there at one look.
-- cpus          BIGINT   CPUs on which the forward thread was seen.
SELECT
  p.engine, p.rank, count(*) AS looks, count(*) FILTER (e.b > 0) AS shared,
  count(*) FILTER (e.b > 0) / count(*) AS shared_share, max(e.b) AS beside_most, count(DISTINCT e.a) AS cpus
FROM notable AS e JOIN engine_process AS p USING (process)
WHERE e.stage = 'thread.placed' AND ($engine IS NULL OR p.engine = $engine)
  AND ($from_ns IS NULL OR e.t_ns >= $from_ns) AND ($to_ns IS NULL OR e.t_ns < $to_ns)
GROUP BY p.engine, p.rank
ORDER BY shared_share DESC, p.engine, p.rank
