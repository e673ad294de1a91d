-- Whose transfers made other requests' steps longer, worst first.
--
-- $from_ns  BIGINT  Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT  Only what began before this time, unix ns; up to the last if not given.
-- $limit    BIGINT  How many requests; 20 if not given.
--
-- request_id    VARCHAR  The request whose transfers were posted, or KV copied, on the forward thread.
-- mode          VARCHAR  How its KV was handed over.
-- moved_bytes   BIGINT   Bytes moved by its transfers.
-- descriptors   BIGINT   Descriptors of its transfers.
-- victims       BIGINT   Other requests whose steps became longer.
-- extension_ms  DOUBLE   By how much, over all of them, ms.
WITH worst AS (
  SELECT
    b.blamed_request_id AS request_id, count(DISTINCT b.request_key) AS victims,
    sum(b.extension_ns)::BIGINT AS extension_ns
  FROM blame AS b JOIN request AS r USING (request_key)
  WHERE b.blamed_request_id <> r.request_id
    AND ($from_ns IS NULL OR r.start_ns >= $from_ns) AND ($to_ns IS NULL OR r.start_ns < $to_ns)
  GROUP BY b.blamed_request_id
  ORDER BY sum(b.extension_ns) DESC, b.blamed_request_id
  LIMIT coalesce($limit, 20)
), known AS (
  SELECT request_id, any_value(mode) AS mode, max(moved_bytes) AS moved_bytes, max(descriptors) AS descriptors
  FROM request WHERE request_id IN (SELECT request_id FROM worst)
  GROUP BY request_id
)
SELECT request_id, mode, moved_bytes, descriptors, victims, extension_ns / 1e6 AS extension_ms
FROM worst LEFT JOIN known USING (request_id)
ORDER BY extension_ns DESC, request_id
