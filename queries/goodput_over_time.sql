-- How many requests were answered within the targets, as time goes by.
--
-- $ttft_target_ms  DOUBLE   The longest time to first token that is good, ms; any if not given.
-- $tpot_target_ms  DOUBLE   The longest time per token after the first that is good, ms; any if not given.
-- $mode            VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope           VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill         VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode          VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns         BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns           BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns       BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts             TIMESTAMP WITH TIME ZONE  When the row's time begins; rates are by what of it lies in the run, and in what was asked for.
-- requests       BIGINT                    Requests that came then.
-- answered       BIGINT                    Those that got a first token.
-- good           BIGINT                    Those within both targets.
-- good_share     DOUBLE                    Part of all that came which was good, 0 to 1.
-- offered_per_s  DOUBLE                    Requests that came, per second.
-- good_per_s     DOUBLE                    Good requests, per second.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns), judged AS (
  SELECT
    r.start_ns // bucket_ns * bucket_ns AS at_ns, r.ttft_ns,
    coalesce(r.ttft_ns <= coalesce($ttft_target_ms * 1e6, r.ttft_ns), false)
      AND coalesce(r.tpot_ns <= $tpot_target_ms * 1e6, true) AS is_good
  FROM request AS r, per
  WHERE ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($scope IS NULL OR r.scope = $scope)
    AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
), counted AS (
  SELECT at_ns, count(*) AS requests, count(ttft_ns) AS answered, count(*) FILTER (is_good) AS good
  FROM judged GROUP BY at_ns
), span AS (
  SELECT min(start_ns) AS first_ns, max(coalesce(end_ns, first_token_ns, start_ns)) AS last_ns FROM request
), covered AS (
  -- A second at least, so that one request in the last moment of a row is no burst.
  SELECT
    *, greatest(
      least(at_ns + bucket_ns, last_ns, $to_ns) - greatest(at_ns, first_ns, $from_ns), least(bucket_ns, 1000000000)
    ) AS covered_ns
  FROM counted, per, span
)
SELECT
  to_timestamp((at_ns // 1000) / 1e6) AS ts, requests, answered, good, good / requests AS good_share,
  requests * 1e9 / covered_ns AS offered_per_s, good * 1e9 / covered_ns AS good_per_s
FROM covered
ORDER BY at_ns
