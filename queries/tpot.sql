-- How the tokens after the first came, request by request, slowest first.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $limit    BIGINT   How many requests; 20 if not given.
--
-- request_id       VARCHAR  The request.
-- mode             VARCHAR  How the KV was handed over.
-- decode_engine    VARCHAR  Engine id of D.
-- tokens           BIGINT   Tokens after the first.
-- tpot_ms          DOUBLE   Mean time per token after the first, ms.
-- itl_p50_ms       DOUBLE   Median time between two steps that made tokens of it, ms.
-- itl_max_ms       DOUBLE   The longest of those, ms.
-- extension_ms     DOUBLE   By how much connector work on the forward thread made its steps longer, ms.
-- by_others_ms     DOUBLE   The part of that in which other requests' transfers were posted, or KV copied, ms.
-- occupancy_ms     DOUBLE   How long the connector took on the forward thread, whether or not it cost anything, ms.
-- mixed_ms         DOUBLE   Time in steps that worked on somebody's prompt too, ms.
-- unattributed_ms  DOUBLE   Time that no step explains, ms.
WITH chosen AS (
  SELECT request_key, request_id, mode, decode_engine FROM request
  WHERE tpot_ns IS NOT NULL
    AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($decode IS NULL OR decode_engine = $decode)
  ORDER BY tpot_ns DESC, request_id
  LIMIT coalesce($limit, 20)
), slowest AS (
  SELECT c.request_id, c.mode, c.decode_engine, p.* FROM chosen AS c JOIN pace AS p USING (request_key)
), parts AS (
  SELECT
    request_key, sum(duration_ns) FILTER (cause = 'decode.mixed') AS mixed_ns,
    sum(duration_ns) FILTER (cause = 'unattributed') AS unattributed_ns
  FROM pace_part WHERE request_key IN (SELECT request_key FROM slowest)
  GROUP BY request_key
), others AS (
  SELECT b.request_key, sum(b.extension_ns) AS by_others_ns
  FROM blame AS b JOIN slowest AS s USING (request_key)
  WHERE b.blamed_request_id <> s.request_id
  GROUP BY b.request_key
)
SELECT
  s.request_id, s.mode, s.decode_engine, s.tokens, s.tpot_ns / 1e6 AS tpot_ms, s.itl_p50_ns / 1e6 AS itl_p50_ms,
  s.itl_max_ns / 1e6 AS itl_max_ms, s.extension_ns / 1e6 AS extension_ms,
  coalesce(o.by_others_ns, 0)::DOUBLE / 1e6 AS by_others_ms, s.occupancy_ns / 1e6 AS occupancy_ms,
  coalesce(p.mixed_ns, 0)::DOUBLE / 1e6 AS mixed_ms, coalesce(p.unattributed_ns, 0)::DOUBLE / 1e6 AS unattributed_ms
FROM slowest AS s LEFT JOIN parts AS p USING (request_key) LEFT JOIN others AS o USING (request_key)
ORDER BY s.tpot_ns DESC, s.request_id
