-- One request: whose transfers were posted, or KV copied, while its steps waited for the connector.
--
-- $request  VARCHAR NOT NULL  The request's id, or the one that its client sent.
-- $attempt  INTEGER           Which attempt, from 0; the last one if not given.
--
-- blamed_request_id  VARCHAR  Request whose transfer was posted, or KV copied; may be the same.
-- extension_ns       BIGINT   By how much that made its steps longer.
WITH chosen AS (
  SELECT * FROM request
  WHERE (request_id = $request OR client_request_id = $request) AND ($attempt IS NULL OR attempt = $attempt)
  ORDER BY request_id = $request DESC, attempt DESC, start_ns DESC
  LIMIT 1
)
SELECT b.blamed_request_id, b.extension_ns
FROM blame AS b JOIN chosen AS c USING (request_key)
ORDER BY b.extension_ns DESC, b.blamed_request_id
