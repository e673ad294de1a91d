-- Push: how often D's registration was there when P had computed, and how late otherwise.
--
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- scenario             VARCHAR  in time: P's blocks came last; late: the registration came last; not known.
-- requests             BIGINT   Requests by push that got a first token.
-- share                DOUBLE   Part of all of those, 0 to 1.
-- lateness_p50_ms      DOUBLE   Median of how long it came after P had computed, ms; negative: before.
-- lateness_p99_ms      DOUBLE   99th percentile of that, ms.
-- ttft_p50_ms          DOUBLE   Median time to first token, ms.
-- coordination_p50_ms  DOUBLE   Median of the part in which the two sides waited for each other, ms.
WITH told AS (
  SELECT
    *,
    CASE WHEN registration_late_ns IS NULL THEN 'not known' WHEN registration_late_ns > 0 THEN 'late' ELSE 'in time' END
      AS scenario
  FROM request
  WHERE mode = 'push' AND ttft_ns IS NOT NULL
    AND ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
)
SELECT
  scenario, count(*) AS requests, count(*) / sum(count(*)) OVER ()::DOUBLE AS share,
  quantile_cont(registration_late_ns, 0.5) / 1e6 AS lateness_p50_ms,
  quantile_cont(registration_late_ns, 0.99) / 1e6 AS lateness_p99_ms, quantile_cont(ttft_ns, 0.5) / 1e6 AS ttft_p50_ms,
  quantile_cont(coordination_ns, 0.5) / 1e6 AS coordination_p50_ms
FROM told
GROUP BY scenario
ORDER BY scenario
