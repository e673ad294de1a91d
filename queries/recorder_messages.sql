-- What the recorder had to say, newest first.
--
-- $limit  BIGINT  How many messages; 100 if not given.
--
-- at       TIMESTAMP WITH TIME ZONE  When.
-- subject  VARCHAR                   The file or part it is about.
-- message  VARCHAR                   One sentence.
SELECT to_timestamp((at_ns // 1000) / 1e6) AS at, subject, message
FROM recorder
ORDER BY at_ns DESC, subject, message
LIMIT coalesce($limit, 100)
