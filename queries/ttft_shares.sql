-- Where the time to first token went, in one row.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope    VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- requests             BIGINT  Requests that got a first token.
-- ttft_mean_ms         DOUBLE  Their mean time to first token, ms.
-- compute_run_share    DOUBLE  Part of all of it: computing, 0 to 1.
-- compute_queue_share  DOUBLE  Part of all of it: waiting for what computing requests held, 0 to 1.
-- coordination_share   DOUBLE  Part of all of it: the two sides waiting for each other, 0 to 1.
-- transfer_share       DOUBLE  Part of all of it: bytes moving, 0 to 1.
-- unattributed_share   DOUBLE  Part of all of it: what no event explains, 0 to 1.
-- transfer_low_share   DOUBLE  The least that the part of bytes moving can be, 0 to 1.
-- transfer_high_share  DOUBLE  The most that it can be, 0 to 1.
WITH whole AS (
  SELECT
    count(*) AS requests, avg(ttft_ns) AS mean_ns, nullif(sum(ttft_ns), 0)::DOUBLE AS ttft_ns,
    sum(compute_run_ns)::DOUBLE AS compute_run_ns, sum(compute_queue_ns)::DOUBLE AS compute_queue_ns,
    sum(coordination_ns)::DOUBLE AS coordination_ns, sum(transfer_ns)::DOUBLE AS transfer_ns,
    sum(unattributed_ns)::DOUBLE AS unattributed_ns, sum(transfer_low_ns)::DOUBLE AS low_ns,
    sum(transfer_high_ns)::DOUBLE AS high_ns
  FROM request
  WHERE ttft_ns IS NOT NULL AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
)
SELECT
  requests, mean_ns / 1e6 AS ttft_mean_ms, compute_run_ns / ttft_ns AS compute_run_share,
  compute_queue_ns / ttft_ns AS compute_queue_share, coordination_ns / ttft_ns AS coordination_share,
  transfer_ns / ttft_ns AS transfer_share, unattributed_ns / ttft_ns AS unattributed_share,
  low_ns / ttft_ns AS transfer_low_share, high_ns / ttft_ns AS transfer_high_share
FROM whole
WHERE requests > 0
