-- One request: the work beside its critical path, which delayed nobody.
--
-- $request  VARCHAR NOT NULL  The request's id, or the one that its client sent.
-- $attempt  INTEGER           Which attempt, from 0; the last one if not given.
--
-- where        VARCHAR  Where the time passed.
-- cause        VARCHAR  What passed it.
-- class        VARCHAR  What it would have been charged to on the path.
-- offset_ns    BIGINT   When it began, from the request's start.
-- duration_ns  BIGINT   How long it took.
-- slack_ns     BIGINT   How much longer it could have taken unnoticed; NULL if unknown.
WITH chosen AS (
  SELECT * FROM request
  WHERE (request_id = $request OR client_request_id = $request) AND ($attempt IS NULL OR attempt = $attempt)
  ORDER BY request_id = $request DESC, attempt DESC, start_ns DESC
  LIMIT 1
)
SELECT h."where", h.cause, h.class, h.start_ns - c.start_ns AS offset_ns, h.duration_ns, h.slack_ns
FROM hidden AS h JOIN chosen AS c USING (request_key)
ORDER BY h.start_ns, h.cause
