-- What was offered against what was served, as time goes by.
--
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $mode       VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts                  TIMESTAMP WITH TIME ZONE  When the row's time begins; rates are by what of it lies in the run, and in what was asked for.
-- arrived_per_s       DOUBLE                    Requests that came, per second.
-- first_tokens_per_s  DOUBLE                    First tokens, per second.
-- ended_per_s         DOUBLE                    Requests last seen then, per second: also of those whose answer goes on, not of those that may still get their first token.
-- in_flight           DOUBLE                    Requests before their first token, or their end without one, when the row's time ends.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns), chosen AS (
  SELECT
    start_ns, first_token_ns, CASE WHEN seen_ns IS NULL THEN end_ns END AS end_ns,
    CASE WHEN first_token_ns IS NULL AND seen_ns IS NULL THEN coalesce(end_ns, start_ns) END AS given_up_ns
  FROM request LEFT JOIN under_way USING (request_key)
  WHERE ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
), moment AS (
  SELECT start_ns AS at_ns, 1 AS arrived, 0 AS answered, 0 AS ended, 1 AS waiting FROM chosen
  UNION ALL SELECT first_token_ns, 0, 1, 0, -1 FROM chosen WHERE first_token_ns IS NOT NULL
  UNION ALL SELECT end_ns, 0, 0, 1, 0 FROM chosen WHERE end_ns IS NOT NULL
  UNION ALL SELECT given_up_ns, 0, 0, 0, -1 FROM chosen WHERE given_up_ns IS NOT NULL
), counted AS (
  SELECT
    at_ns // bucket_ns * bucket_ns AS at_ns, sum(arrived)::DOUBLE AS arrived, sum(answered)::DOUBLE AS answered,
    sum(ended)::DOUBLE AS ended, sum(waiting)::DOUBLE AS waiting
  FROM moment, per GROUP BY at_ns // bucket_ns, bucket_ns
), span AS (
  SELECT min(start_ns) AS first_ns, max(coalesce(end_ns, first_token_ns, start_ns)) AS last_ns FROM request
), covered AS (
  -- A second at least, so that one request in the last moment of a row is no burst.
  SELECT
    *, greatest(
      least(at_ns + bucket_ns, last_ns, CASE WHEN at_ns < $to_ns THEN $to_ns END)
        - greatest(at_ns, first_ns, $from_ns),
      least(bucket_ns, 1000000000)
    ) AS covered_ns
  FROM counted, per, span
)
SELECT
  to_timestamp((at_ns // 1000) / 1e6) AS ts, arrived * 1e9 / covered_ns AS arrived_per_s,
  answered * 1e9 / covered_ns AS first_tokens_per_s, ended * 1e9 / covered_ns AS ended_per_s,
  sum(waiting) OVER (ORDER BY at_ns) AS in_flight
FROM covered
ORDER BY at_ns
