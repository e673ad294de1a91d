-- The requests that waited longest for their first token, and what for.
--
-- $mode   VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $limit  BIGINT   How many to list; 10 if not given.
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
SELECT
  request_id, client_request_id, attempt, started, mode, verdict, scope, ttft_ms, compute_ns / 1e6 AS compute_ms,
  coordination_ns / 1e6 AS coordination_ms, transfer_ns / 1e6 AS transfer_ms,
  unattributed_ns / 1e6 AS unattributed_ms, top_cause, top_cause_ns / 1e6 AS top_cause_ms
FROM ttft
WHERE ttft_ns IS NOT NULL AND ($mode IS NULL OR mode = $mode)
ORDER BY ttft_ns DESC, request_id
LIMIT coalesce($limit, 10)
