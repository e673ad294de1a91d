-- Checksums of handed-over blocks, by mode: how many requests and blocks were compared, differ, or could not be compared.
--
-- mode              VARCHAR  How the KV was handed over.
-- requests          BIGINT   Requests that were chosen for checking.
-- corrupt_requests  BIGINT   Requests of which a block differs on D from what P computed.
-- whole_requests    BIGINT   Requests of which every block was compared and is the same.
-- checked_blocks    BIGINT   Blocks that were compared.
-- corrupt_blocks    BIGINT   Blocks that differ.
-- unchecked_blocks  BIGINT   Blocks that could not be compared; the requests' notes say why.
SELECT
  mode, count(*) AS requests,
  count(*) FILTER (corrupt_blocks > 0) AS corrupt_requests,
  count(*) FILTER (checked_blocks > 0 AND corrupt_blocks = 0 AND unchecked_blocks = 0) AS whole_requests,
  sum(checked_blocks)::BIGINT AS checked_blocks, sum(corrupt_blocks)::BIGINT AS corrupt_blocks,
  sum(unchecked_blocks)::BIGINT AS unchecked_blocks
FROM request
WHERE checked_blocks IS NOT NULL
GROUP BY mode
ORDER BY mode
