-- Where the time to first token went, by how many requests were in flight when one came.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope    VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- in_flight_from    BIGINT   Fewest requests in flight in the whole run, the one that came counted; each to its end, else to its last sign.
-- in_flight_to      BIGINT   Most of them.
-- mode              VARCHAR  How the KV was handed over.
-- scope             VARCHAR  Where the first token was seen; scopes do not compare.
-- requests          BIGINT   Requests that got a first token.
-- compute_run_ms    DOUBLE   Mean per request: computing, ms.
-- compute_queue_ms  DOUBLE   Mean per request: waiting for what computing requests held, ms.
-- coordination_ms   DOUBLE   Mean per request: the two sides waiting for each other, ms.
-- transfer_ms       DOUBLE   Mean per request: bytes moving, ms.
-- unattributed_ms   DOUBLE   Mean per request: what no event explains, ms.
-- ttft_p50_ms       DOUBLE   Median time to first token, ms.
-- ttft_p90_ms       DOUBLE   90th percentile of that, ms.
-- ttft_p99_ms       DOUBLE   99th percentile of that, ms.
WITH lived AS (
  -- What was over before the time asked for was in flight with nothing in it.
  SELECT request_key, start_ns, greatest(coalesce(end_ns, start_ns), start_ns + 1) AS end_ns FROM request
  WHERE ($from_ns IS NULL OR coalesce(end_ns, start_ns) >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
), edge AS (
  SELECT start_ns AS at_ns, 1 AS change, request_key FROM lived
  UNION ALL
  SELECT end_ns, -1, NULL FROM lived
), counted AS (
  SELECT request_key, sum(change) OVER (ORDER BY at_ns, change)::BIGINT AS in_flight FROM edge
), crowded AS (
  SELECT r.*, (1::BIGINT << floor(log2(c.in_flight))::INTEGER) AS in_flight_from
  FROM request AS r JOIN counted AS c USING (request_key)
  WHERE r.ttft_ns IS NOT NULL
    AND ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
    AND ($mode IS NULL OR r.mode = $mode) AND ($scope IS NULL OR r.scope = $scope)
    AND ($prefill IS NULL OR r.prefill_engine = $prefill) AND ($decode IS NULL OR r.decode_engine = $decode)
)
SELECT
  in_flight_from, 2 * in_flight_from - 1 AS in_flight_to, mode, scope, count(*) AS requests,
  avg(compute_run_ns) / 1e6 AS compute_run_ms, avg(compute_queue_ns) / 1e6 AS compute_queue_ms,
  avg(coordination_ns) / 1e6 AS coordination_ms, avg(transfer_ns) / 1e6 AS transfer_ms,
  avg(unattributed_ns) / 1e6 AS unattributed_ms, quantile_cont(ttft_ns, 0.5) / 1e6 AS ttft_p50_ms,
  quantile_cont(ttft_ns, 0.9) / 1e6 AS ttft_p90_ms, quantile_cont(ttft_ns, 0.99) / 1e6 AS ttft_p99_ms
FROM crowded
GROUP BY ALL
ORDER BY mode, scope, in_flight_from
