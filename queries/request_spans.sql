-- One request as spans, in the form that Grafana's trace panel reads.
--
-- $request  VARCHAR NOT NULL  The request's id, or the one that its client sent.
-- $attempt  INTEGER           Which attempt, from 0; the last one if not given.
--
-- traceID        VARCHAR  The same for all spans of the request.
-- spanID         VARCHAR  Unique within it.
-- parentSpanID   VARCHAR  The span around it; '' for the request itself.
-- operationName  VARCHAR  The cause with its class, or the lane.
-- serviceName    VARCHAR  The lane: router, P, transfer, D, or hidden work.
-- startTime      DOUBLE   When it began, unix ms.
-- duration       DOUBLE   How long it took, ms.
WITH chosen AS (
  SELECT
    * REPLACE (CASE WHEN request_key IN (SELECT request_key FROM under_way) THEN 'under way' ELSE verdict END AS verdict)
  FROM request
  WHERE (request_id = $request OR client_request_id = $request) AND ($attempt IS NULL OR attempt = $attempt)
  ORDER BY request_id = $request DESC, attempt DESC, start_ns DESC
  LIMIT 1
), piece AS (
  SELECT
    format('path-{}', s.position) AS span, 'path' AS parent, s.cause || ' (' || s.class || ')' AS name,
    s."where" AS lane, s.start_ns, s.end_ns - s.start_ns AS duration_ns
  FROM segment AS s JOIN chosen AS c USING (request_key)
  UNION ALL
  SELECT
    format('hidden-{}', row_number() OVER (ORDER BY h.start_ns, h.cause)), 'hidden', h.cause || ' (hidden)', h."where",
    h.start_ns, h.duration_ns
  FROM hidden AS h JOIN chosen AS c USING (request_key)
), span AS (
  SELECT
    'request' AS span, '' AS parent, format('request ({}, {})', mode, verdict) AS name, 'request' AS lane, start_ns,
    coalesce(greatest(end_ns, first_token_ns), start_ns) - start_ns AS duration_ns, 0 AS level
  FROM chosen
  UNION ALL
  SELECT 'path', 'request', 'time to first token', 'request', start_ns, ttft_ns, 1
  FROM chosen WHERE ttft_ns IS NOT NULL
  UNION ALL
  SELECT
    'hidden', 'request', 'beside the path', 'request', min(start_ns), max(start_ns + duration_ns) - min(start_ns), 1
  FROM piece WHERE parent = 'hidden' HAVING count(*) > 0
  UNION ALL
  SELECT span, parent, name, lane, start_ns, duration_ns, 2 FROM piece
)
SELECT
  md5(c.request_id || ' ' || c.attempt) AS "traceID", s.span AS "spanID", s.parent AS "parentSpanID",
  s.name AS "operationName",
  CASE s.lane
    WHEN 'prefill' THEN 'P ' || coalesce(c.prefill_engine, '') WHEN 'decode' THEN 'D ' || coalesce(c.decode_engine, '')
    ELSE s.lane
  END AS "serviceName",
  s.start_ns / 1e6 AS "startTime", s.duration_ns / 1e6 AS "duration"
FROM span AS s, chosen AS c
ORDER BY s.level, s.parent DESC, s.start_ns, s.span
