-- One request: its critical path, which fills its time to first token without gap or overlap.
--
-- $request  VARCHAR NOT NULL  The request's id, or the one that its client sent.
-- $attempt  INTEGER           Which attempt, from 0; the last one if not given.
--
-- position       INTEGER  Order along the path, from 0.
-- where          VARCHAR  Where the time passed.
-- cause          VARCHAR  What passed it.
-- class          VARCHAR  The class that it counts for.
-- offset_ns      BIGINT   When it began, from the request's start.
-- duration_ns    BIGINT   How long it took.
-- share          DOUBLE   Part of the time to first token, 0 to 1.
-- waited_for     VARCHAR  What the request waited for.
-- crosses_hosts  BOOLEAN  It rests on two hosts' wall clocks.
WITH chosen AS (
  SELECT * FROM request
  WHERE (request_id = $request OR client_request_id = $request) AND ($attempt IS NULL OR attempt = $attempt)
  ORDER BY request_id = $request DESC, attempt DESC, start_ns DESC
  LIMIT 1
)
SELECT
  s.position, s."where", s.cause, s.class, s.start_ns - c.start_ns AS offset_ns, s.end_ns - s.start_ns AS duration_ns,
  (s.end_ns - s.start_ns)::DOUBLE / nullif(c.ttft_ns, 0) AS share, s.waited_for, s.crosses_hosts
FROM segment AS s JOIN chosen AS c USING (request_key)
ORDER BY s.position
