-- From when to when requests were recorded.
--
-- first_at  TIMESTAMP WITH TIME ZONE  The first moment of the first request; NULL without any.
-- last_at   TIMESTAMP WITH TIME ZONE  The last moment of the last one.
-- from_ms   BIGINT                    The first in unix ms, rounded down.
-- to_ms     BIGINT                    The last in unix ms, rounded up.
-- requests  BIGINT                    Requests between them.
WITH span AS (
  SELECT min(start_ns) AS first_ns, max(coalesce(end_ns, first_token_ns, start_ns)) AS last_ns, count(*) AS requests
  FROM request
)
SELECT
  to_timestamp((first_ns // 1000) / 1e6) AS first_at, to_timestamp((last_ns // 1000) / 1e6) AS last_at,
  first_ns // 1000000 AS from_ms, last_ns // 1000000 + 1 AS to_ms, requests
FROM span
