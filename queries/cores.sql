-- How often the forward thread of a worker shared its core with another busy thread of its process, and with which.
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
-- beside        VARCHAR  Their names, each with at how many looks, most first; nixl: came with the NIXL agent. NULL if not told.
-- cpus          BIGINT   CPUs on which the forward thread was seen.
WITH looked AS (
  SELECT p.engine, p.rank, e.a AS cpu, e.b AS beside, e."ref" AS names
  FROM notable AS e JOIN engine_process AS p USING (process)
  WHERE e.stage = 'thread.placed' AND ($engine IS NULL OR p.engine = $engine)
    AND ($from_ns IS NULL OR e.t_ns >= $from_ns) AND ($to_ns IS NULL OR e.t_ns < $to_ns)
), named AS (
  SELECT engine, rank, name, count(*) AS looks
  FROM (SELECT engine, rank, unnest(string_split(names, ',')) AS name FROM looked WHERE names <> '')
  GROUP BY engine, rank, name
), told AS (
  SELECT engine, rank, string_agg(name || ' ' || looks, ', ' ORDER BY looks DESC, name) AS beside
  FROM named GROUP BY engine, rank
)
SELECT
  e.engine, e.rank, count(*) AS looks, count(*) FILTER (e.beside > 0) AS shared,
  count(*) FILTER (e.beside > 0) / count(*) AS shared_share, max(e.beside) AS beside_most,
  any_value(t.beside) AS beside, count(DISTINCT e.cpu) AS cpus
FROM looked AS e LEFT JOIN told AS t ON t.engine = e.engine AND t.rank IS NOT DISTINCT FROM e.rank
GROUP BY e.engine, e.rank
ORDER BY shared_share DESC, e.engine, e.rank
