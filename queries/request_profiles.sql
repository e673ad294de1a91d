-- One request's profiles, for Pyroscope: none without `record --profile URL` (`--profile-dir`: `export -f pprof`).
--
-- $request  VARCHAR NOT NULL  The request's id, or the one that its client sent.
-- $attempt  INTEGER           Which attempt, from 0; the last one if not given.
--
-- side         VARCHAR  Which side of the hand-off: prefill or decode.
-- engine       VARCHAR  The label `engine` of its profiles: the engine's id as processes send it, 128 letters at most.
-- application  VARCHAR  Pyroscope's service_name.
-- from_ms      BIGINT   When to begin, unix ms: an upload of 10 s before the request did.
-- to_ms        BIGINT   When to end, unix ms.
WITH chosen AS (
  SELECT * FROM request
  WHERE (request_id = $request OR client_request_id = $request) AND ($attempt IS NULL OR attempt = $attempt)
  ORDER BY request_id = $request DESC, attempt DESC, start_ns DESC
  LIMIT 1
), place AS (
  SELECT
    max(value) FILTER (WHERE name = 'profiles.url') AS url,
    max(value) FILTER (WHERE name = 'profiles.dir') AS folder,
    coalesce(max(value) FILTER (WHERE name = 'profiles') = 'joined', false) AS joined,
    max(value) FILTER (WHERE name = 'profiles.application') AS application
  FROM run
), sides AS (
  SELECT 'prefill' AS side, 0 AS turn, prefill_engine AS engine, start_ns, end_ns, first_token_ns FROM chosen
  UNION ALL
  SELECT 'decode', 1, decode_engine, start_ns, end_ns, first_token_ns FROM chosen
)
SELECT
  side, regexp_replace(left(engine, 128), '[\p{C}\p{Zl}\p{Zp}]', '?', 'g') AS engine,
  coalesce(application, 'kvtrace') AS application, start_ns // 1000000 - 10000 AS from_ms,
  greatest(start_ns, coalesce(end_ns, 0), coalesce(first_token_ns, 0)) // 1000000 + 1 AS to_ms
FROM sides, place
WHERE url IS NOT NULL AND folder IS NULL AND NOT joined AND coalesce(engine, '') <> ''
ORDER BY turn
