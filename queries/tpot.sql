-- How the tokens after the first came, request by request, slowest first.
--
-- $mode   VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $limit  BIGINT   How many requests; 20 if not given.
--
-- request_id       VARCHAR  The request.
-- mode             VARCHAR  How the KV was handed over.
-- decode_engine    VARCHAR  Engine id of D.
-- tokens           BIGINT   Tokens after the first.
-- tpot_ms          DOUBLE   Mean time per token after the first, ms.
-- itl_p50_ms       DOUBLE   Median time between two steps that made tokens of it, ms.
-- itl_max_ms       DOUBLE   The longest of those, ms.
-- extension_ms     DOUBLE   By how much connector work on the forward thread made its steps longer, ms.
-- by_others_ms     DOUBLE   The part of that in which other requests' transfers were posted, ms.
-- occupancy_ms     DOUBLE   How long the connector took on the forward thread, whether or not it cost anything, ms.
-- mixed_ms         DOUBLE   Time in steps that worked on somebody's prompt too, ms.
-- unattributed_ms  DOUBLE   Time that no step explains, ms.
SELECT
  request_id, mode, decode_engine, tokens, tpot_ms, itl_p50_ns / 1e6 AS itl_p50_ms, itl_max_ns / 1e6 AS itl_max_ms,
  extension_ns / 1e6 AS extension_ms, by_others_ns / 1e6 AS by_others_ms, occupancy_ns / 1e6 AS occupancy_ms,
  mixed_ns / 1e6 AS mixed_ms, unattributed_ns / 1e6 AS unattributed_ms
FROM tpot
WHERE tpot_ns IS NOT NULL AND ($mode IS NULL OR mode = $mode)
ORDER BY tpot_ns DESC, request_id
LIMIT coalesce($limit, 20)
