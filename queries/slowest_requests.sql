-- The requests that waited longest for their first token, and what for.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope    VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $limit    BIGINT   How many to list; 10 if not given.
--
-- request_id         VARCHAR                   The request.
-- client_request_id  VARCHAR                   The id that the client sent.
-- attempt            INTEGER                   0 for the first attempt.
-- started            TIMESTAMP WITH TIME ZONE  First moment seen.
-- mode               VARCHAR                   How the KV was handed over.
-- verdict            VARCHAR                   How the request ended.
-- scope              VARCHAR                   Where the first token was seen.
-- ttft_ms            DOUBLE                    Time to first token, ms.
-- compute_ms         DOUBLE                    The part that computed or waited for computing requests, ms.
-- coordination_ms    DOUBLE                    The part in which the two sides waited for each other, ms.
-- transfer_ms        DOUBLE                    The part in which bytes moved, ms.
-- unattributed_ms    DOUBLE                    The part that no event explains, ms.
-- top_cause          VARCHAR                   The cause that took most of it.
-- top_cause_ms       DOUBLE                    How much that was, ms.
WITH slowest AS (
  SELECT * FROM request
  WHERE ttft_ns IS NOT NULL AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
  ORDER BY ttft_ns DESC, request_id
  LIMIT coalesce($limit, 10)
), per_cause AS (
  SELECT request_key, cause, sum(end_ns - start_ns)::BIGINT AS cause_ns
  FROM segment WHERE request_key IN (SELECT request_key FROM slowest)
  GROUP BY request_key, cause
), top AS (
  SELECT request_key, arg_max(cause, cause_ns) AS cause, max(cause_ns) AS cause_ns FROM per_cause GROUP BY request_key
)
SELECT
  request_id, client_request_id, attempt, to_timestamp((start_ns // 1000) / 1e6) AS started, mode, verdict, scope,
  ttft_ns / 1e6 AS ttft_ms, compute_ns / 1e6 AS compute_ms, coordination_ns / 1e6 AS coordination_ms,
  transfer_ns / 1e6 AS transfer_ms, unattributed_ns / 1e6 AS unattributed_ms, top.cause AS top_cause,
  top.cause_ns / 1e6 AS top_cause_ms
FROM slowest LEFT JOIN top USING (request_key)
ORDER BY ttft_ns DESC, request_id
