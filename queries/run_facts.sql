-- What was run, with which versions.
--
-- name   VARCHAR  Name of the fact.
-- value  VARCHAR  Its value; several processes' different values are joined by a comma.
SELECT name, value FROM run WHERE name NOT LIKE 'recorder.%' ORDER BY name
