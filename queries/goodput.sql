-- How many requests were answered within the targets, and the percentiles beside it.
--
-- $ttft_target_ms  DOUBLE   The longest time to first token that is good, ms; any if not given.
-- $tpot_target_ms  DOUBLE   The longest time per token after the first that is good, ms; any if not given.
-- $mode            VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope           VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill         VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode          VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns         BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns           BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- mode           VARCHAR  How the KV was handed over.
-- scope          VARCHAR  Where the first token was seen; scopes do not compare.
-- requests       BIGINT   Requests that came.
-- answered       BIGINT   Those that got a first token.
-- good           BIGINT   Those within both targets; without a second token only the first target counts.
-- good_share     DOUBLE   Part of all that came which was good, 0 to 1.
-- offered_per_s  DOUBLE   Requests that came by the seconds from the first arrival to the last end.
-- good_per_s     DOUBLE   Good requests by the same seconds.
-- ttft_mean_ms   DOUBLE   Mean time to first token, ms.
-- ttft_p50_ms    DOUBLE   Median of it, ms.
-- ttft_p90_ms    DOUBLE   90th percentile, ms.
-- ttft_p99_ms    DOUBLE   99th percentile, ms.
-- tpot_mean_ms   DOUBLE   Mean time per token after the first, ms.
-- tpot_p50_ms    DOUBLE   Median of it, ms.
-- tpot_p90_ms    DOUBLE   90th percentile, ms.
-- tpot_p99_ms    DOUBLE   99th percentile, ms.
WITH judged AS (
  SELECT
    r.mode, r.scope, r.ttft_ns, r.tpot_ns, r.start_ns, coalesce(r.end_ns, r.first_token_ns, r.start_ns) AS end_ns,
    coalesce(r.ttft_ns <= coalesce($ttft_target_ms * 1e6, r.ttft_ns), false)
      AND coalesce(r.tpot_ns <= $tpot_target_ms * 1e6, true) AS is_good
  FROM request AS r
  WHERE ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($scope IS NULL OR r.scope = $scope)
    AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
), counted AS (
  SELECT
    mode, scope, count(*) AS requests, count(ttft_ns) AS answered, count(*) FILTER (is_good) AS good,
    nullif(max(end_ns) - min(start_ns), 0) / 1e9 AS seconds,
    avg(ttft_ns) / 1e6 AS ttft_mean_ms, quantile_cont(ttft_ns, [0.5, 0.9, 0.99]) AS ttft,
    avg(tpot_ns) / 1e6 AS tpot_mean_ms, quantile_cont(tpot_ns, [0.5, 0.9, 0.99]) AS tpot
  FROM judged GROUP BY mode, scope
)
SELECT
  mode, scope, requests, answered, good, good / requests AS good_share, requests / seconds AS offered_per_s,
  good / seconds AS good_per_s, ttft_mean_ms, ttft[1] / 1e6 AS ttft_p50_ms, ttft[2] / 1e6 AS ttft_p90_ms,
  ttft[3] / 1e6 AS ttft_p99_ms, tpot_mean_ms, tpot[1] / 1e6 AS tpot_p50_ms, tpot[2] / 1e6 AS tpot_p90_ms,
  tpot[3] / 1e6 AS tpot_p99_ms
FROM counted
ORDER BY mode, scope
