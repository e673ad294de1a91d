-- One request: what became of it and where its time went, in ns.
--
-- $request  VARCHAR NOT NULL  The request's id, or the one that its client sent.
-- $attempt  INTEGER           Which attempt, from 0; the last one if not given.
--
-- request_id            VARCHAR                   The request.
-- client_request_id     VARCHAR                   The id that the client sent.
-- attempt               INTEGER                   0 for the first attempt.
-- started               TIMESTAMP WITH TIME ZONE  First moment seen.
-- mode                  VARCHAR                   How the KV was handed over.
-- verdict               VARCHAR                   How it ended, or under way.
-- scope                 VARCHAR                   Where the first token was seen; scopes do not compare.
-- prefill_engine        VARCHAR                   Engine id of P.
-- decode_engine         VARCHAR                   Engine id of D.
-- prompt_tokens         BIGINT                    Length of the prompt; NULL if nobody said it.
-- cached_tokens         BIGINT                    Prompt tokens that D had in its prefix cache; NULL if it was not seen to look.
-- remote_tokens         BIGINT                    Prompt tokens that were to come from P; NULL if D did not say how many.
-- output_tokens         BIGINT                    Tokens produced; NULL if nobody said how many.
-- ttft_ns               BIGINT                    Time to first token.
-- compute_run_ns        BIGINT                    The part computing.
-- compute_queue_ns      BIGINT                    The part waiting for what computing requests held.
-- coordination_ns       BIGINT                    The part in which the two sides waited for each other.
-- transfer_ns           BIGINT                    The part in which bytes moved.
-- unattributed_ns       BIGINT                    The part that no event explains.
-- transfer_low_ns       BIGINT                    The least that transfer can have been.
-- transfer_high_ns      BIGINT                    The most that transfer can have been.
-- registration_late_ns  BIGINT                    How long after P's forward D's registration came; negative: before.
-- tpot_ns               BIGINT                    Mean time per token after the first.
-- moved_bytes           BIGINT                    Bytes moved by its transfers.
-- descriptors           BIGINT                    Descriptors of its transfers.
-- transfers             INTEGER                   Transfers it took.
-- note                  VARCHAR                   What else is to be said.
WITH chosen AS (
  SELECT
    * REPLACE (CASE WHEN request_key IN (SELECT request_key FROM under_way) THEN 'under way' ELSE verdict END AS verdict)
  FROM request
  WHERE (request_id = $request OR client_request_id = $request) AND ($attempt IS NULL OR attempt = $attempt)
  ORDER BY request_id = $request DESC, attempt DESC, start_ns DESC
  LIMIT 1
)
SELECT
  request_id, client_request_id, attempt, to_timestamp((c.start_ns // 1000) / 1e6) AS started, mode, verdict, scope,
  prefill_engine, decode_engine, prompt_tokens, cached_tokens, remote_tokens, output_tokens, ttft_ns, compute_run_ns, compute_queue_ns,
  coordination_ns, transfer_ns, unattributed_ns, transfer_low_ns, transfer_high_ns, registration_late_ns, p.tpot_ns,
  moved_bytes, descriptors, transfers, note
FROM chosen AS c LEFT JOIN pace AS p USING (request_key)
