-- What the run says in plain words, most time at stake first; each of all requests of its mode and scope, if one is chosen.
--
-- $mode     VARCHAR  Only push, pull, local or unknown; all of them if not given.
-- $scope    VARCHAR  Only this scope: client, router or engine; all of them if not given.
-- $prefill  VARCHAR  Only requests whose P is this engine; all of them if not given.
-- $decode   VARCHAR  Only requests whose D is this engine; all of them if not given.
-- $from_ns  BIGINT   Only what began at or after this time, unix ns; from the first on if not given.
-- $to_ns    BIGINT   Only what began before this time, unix ns; up to the last if not given.
--
-- rank        INTEGER                   1 for the most time at stake.
-- name        VARCHAR                   Which finding: a cause, a verdict, or a name of its own.
-- sentence    VARCHAR                   What is the case, with numbers.
-- grade       VARCHAR                   How sure it is: measured, explained or supposed.
-- class       VARCHAR                   The class that it counts for; '' where none can be told.
-- stake_ns    BIGINT                    Request time that it is about, summed.
-- remedy      VARCHAR                   What usually helps: supposed, not measured; '' where none can be told.
-- query       VARCHAR                   The named query that shows it.
-- request_id  VARCHAR                   The request that shows it most; NULL where it is about none.
-- examples    VARCHAR[]                 That one and the next, at most three.
-- mode        VARCHAR                   The mode of the requests that it is about; '' for all of the run.
-- scope       VARCHAR                   Their scope; '' for all of the run.
-- since       TIMESTAMP WITH TIME ZONE  The first moment of the requests that were looked at.
-- as_of       TIMESTAMP WITH TIME ZONE  The last moment of them.
WITH chosen AS (
  SELECT mode, scope FROM request
  WHERE ($from_ns IS NULL OR start_ns >= $from_ns) AND ($to_ns IS NULL OR start_ns < $to_ns)
    AND ($mode IS NULL OR mode = $mode) AND ($scope IS NULL OR scope = $scope)
    AND ($prefill IS NULL OR prefill_engine = $prefill) AND ($decode IS NULL OR decode_engine = $decode)
  GROUP BY mode, scope
)
SELECT
  rank, name, sentence, grade, class, stake_ns, remedy, query, examples[1] AS request_id, examples, mode, scope,
  to_timestamp((from_ns // 1000) / 1e6) AS since, to_timestamp((as_of_ns // 1000) / 1e6) AS as_of
FROM finding AS f
WHERE CASE
  WHEN f.mode = '' AND f.scope = '' THEN EXISTS (SELECT 1 FROM chosen)
  ELSE (f.mode, f.scope) IN (SELECT (mode, scope) FROM chosen)
END
ORDER BY rank
