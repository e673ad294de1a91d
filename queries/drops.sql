-- What was lost before it could be recorded: nothing, or per process and stage how much.
--
-- process       INTEGER                   Number of the process.
-- kind          VARCHAR                   Kind of the process.
-- engine        VARCHAR                   Engine id.
-- stage         VARCHAR                   Stage whose records were lost; '' for slots taken and never completed.
-- lost_records  BIGINT                    Records lost.
-- last_at       TIMESTAMP WITH TIME ZONE  The process's last event.
SELECT p.process, p.kind, p.engine, loss.stage, loss.lost_records, p.last_at
FROM loss JOIN engine_process AS p USING (process)
ORDER BY loss.lost_records DESC, p.process, loss.stage
