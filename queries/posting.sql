-- How long transfers took to post against how long their bytes were on the wire, per pair of engines.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- mode                    VARCHAR  How the KV was handed over.
-- prefill_engine          VARCHAR  Engine id of P.
-- decode_engine           VARCHAR  Engine id of D.
-- requests                BIGINT   Requests with a post on their way to the first token.
-- post_p50_ms             DOUBLE   Median time posting, ms.
-- wire_p50_ms             DOUBLE   Median time on the wire, taken to end as early as the evidence allows, ms.
-- wire_high_p50_ms        DOUBLE   Median of the most that the wire can have taken, ms.
-- post_share              DOUBLE   Part of posting in posting and wire, 0 to 1.
-- post_share_low          DOUBLE   The least that this part can be, 0 to 1.
-- descriptors_p50         DOUBLE   Median number of descriptors.
-- post_us_per_descriptor  DOUBLE   Posting time by descriptors, us.
-- moved_mib_p50           DOUBLE   Median of the bytes moved, MiB.
WITH spent AS (
  SELECT
    mode, prefill_engine, decode_engine, descriptors, moved_bytes, transfer_high_ns AS high_ns, post_ns,
    coalesce(wire_ns, 0) AS wire_ns
  FROM request
  WHERE post_ns IS NOT NULL
    AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
)
SELECT
  mode, prefill_engine, decode_engine, count(*) AS requests, quantile_cont(post_ns, 0.5) / 1e6 AS post_p50_ms,
  quantile_cont(wire_ns, 0.5) / 1e6 AS wire_p50_ms,
  quantile_cont(greatest(high_ns - post_ns, 0), 0.5) / 1e6 AS wire_high_p50_ms,
  sum(post_ns)::DOUBLE / nullif(sum(post_ns + wire_ns), 0)::DOUBLE AS post_share,
  sum(post_ns)::DOUBLE / nullif(sum(greatest(high_ns, post_ns)), 0)::DOUBLE AS post_share_low,
  quantile_cont(descriptors, 0.5)::DOUBLE AS descriptors_p50,
  sum(post_ns)::DOUBLE / nullif(sum(descriptors), 0)::DOUBLE / 1e3 AS post_us_per_descriptor,
  quantile_cont(moved_bytes, 0.5) / 1048576 AS moved_mib_p50
FROM spent
GROUP BY mode, prefill_engine, decode_engine
ORDER BY mode, prefill_engine, decode_engine
