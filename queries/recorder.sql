-- How the recording went: is it behind, and did it lose anything.
--
-- state          VARCHAR                   recording or complete, as the recorder said last; NULL if there was none.
-- events         BIGINT                    Events in the store.
-- lost_records   BIGINT                    Records that processes could not keep.
-- silenced       BIGINT                    Processes in which tracing switched itself off.
-- skipped_files  BIGINT                    Spool files that the recorder cannot read, or knows under another name.
-- messages       BIGINT                    Messages of the recorder.
-- lag_ms         DOUBLE                    How old the newest event was when it was committed, ms.
-- published      TIMESTAMP WITH TIME ZONE  When this snapshot was published.
-- newest         TIMESTAMP WITH TIME ZONE  The newest event in it.
-- age_ms         DOUBLE                    How much older that event was than the publication, ms.
WITH said AS (
  SELECT
    max(value) FILTER (name = 'recorder.state') AS state,
    TRY_CAST(max(value) FILTER (name = 'recorder.skipped_files') AS BIGINT) AS skipped_files,
    TRY_CAST(max(value) FILTER (name = 'recorder.lag_ms') AS DOUBLE) AS lag_ms,
    TRY_CAST(max(value) FILTER (name = 'recorder.published_ns') AS BIGINT) AS published_ns
  FROM run
), kept AS (
  SELECT
    coalesce(sum(events), 0)::BIGINT AS events,
    count(DISTINCT process) FILTER (stage = 'tracing.disabled') AS silenced
  FROM occurrence
), seen AS (
  SELECT max(last_ns) AS newest_ns, coalesce(sum(lost_records), 0)::BIGINT AS lost_records FROM process
)
SELECT
  state, events, lost_records, silenced, skipped_files, (SELECT count(*) FROM recorder) AS messages, lag_ms,
  to_timestamp((published_ns // 1000) / 1e6) AS published, to_timestamp((newest_ns // 1000) / 1e6) AS newest,
  (published_ns - newest_ns) / 1e6 AS age_ms
FROM said, kept, seen
