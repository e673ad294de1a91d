-- Whose transfers made other requests' steps longer, worst first.
--
-- $limit  BIGINT  How many requests; 20 if not given.
--
-- request_id    VARCHAR  The request whose transfers were posted on the forward thread.
-- mode          VARCHAR  How its KV was handed over.
-- moved_bytes   BIGINT   Bytes moved by its transfers.
-- descriptors   BIGINT   Descriptors of its transfers.
-- victims       BIGINT   Other requests whose steps became longer.
-- extension_ms  DOUBLE   By how much, over all of them, ms.
SELECT request_id, mode, moved_bytes, descriptors, victims, extension_ns / 1e6 AS extension_ms
FROM blamed
ORDER BY extension_ns DESC, request_id
LIMIT coalesce($limit, 20)
