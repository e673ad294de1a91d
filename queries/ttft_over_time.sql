-- Where the time to first token went, as time goes by.
--
-- $mode       VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope      VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill    VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode     VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns    BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns      BIGINT   Only what began before this time, unix ns; up to the last if not given.
-- $bucket_ns  BIGINT   Length of one row's time, ns; a minute if not given.
--
-- ts                TIMESTAMP WITH TIME ZONE  When the row's time begins.
-- scope             VARCHAR                   Where the first token was seen; scopes do not compare.
-- requests          BIGINT                    Requests that began then and got a first token.
-- compute_run_ms    DOUBLE                    Mean per request: computing, ms.
-- compute_queue_ms  DOUBLE                    Mean per request: waiting for what computing requests held, ms.
-- coordination_ms   DOUBLE                    Mean per request: the two sides waiting for each other, ms.
-- transfer_ms       DOUBLE                    Mean per request: bytes moving, ms.
-- unattributed_ms   DOUBLE                    Mean per request: what no event explains, ms.
-- ttft_p50_ms       DOUBLE                    Median time to first token, ms.
-- ttft_p90_ms       DOUBLE                    90th percentile of that, ms.
-- ttft_p99_ms       DOUBLE                    99th percentile of that, ms.
WITH per AS (SELECT greatest(coalesce($bucket_ns, 60000000000), 1) AS bucket_ns)
SELECT
  to_timestamp((start_ns // bucket_ns * bucket_ns // 1000) / 1e6) AS ts, scope, count(*) AS requests,
  avg(compute_run_ns) / 1e6 AS compute_run_ms, avg(compute_queue_ns) / 1e6 AS compute_queue_ms,
  avg(coordination_ns) / 1e6 AS coordination_ms, avg(transfer_ns) / 1e6 AS transfer_ms,
  avg(unattributed_ns) / 1e6 AS unattributed_ms,
  quantile_cont(ttft_ns, 0.5) / 1e6 AS ttft_p50_ms, quantile_cont(ttft_ns, 0.9) / 1e6 AS ttft_p90_ms,
  quantile_cont(ttft_ns, 0.99) / 1e6 AS ttft_p99_ms
FROM request, per
WHERE ttft_ns IS NOT NULL AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
  AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
  AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
GROUP BY ALL
ORDER BY ts, scope
