"""Programs that read a store again and again while it is recorded, and tell of every reading in a line of JSON.

`python -m tests.engine.readers store RUN.duckdb` opens each snapshot through kvtrace, asks everything and closes it.
`python -m tests.engine.readers copy RUN.grafana.duckdb` does as Grafana's plug-in does, with the Python that has its
DuckDB 1.5: it opens the file read-write, keeps it open, and opens it anew before a query if the file has become newer.
Now and then it first leaves a .wal behind, as a program does that writes and is killed.

Standard input: JSON, {"asked": [sql, …], "since_ns": …}. SIGTERM: everything is asked once more, then it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Ask = Callable[[str], list[tuple[Any, ...]]]

LEAVES_EVERY = 4
"""Of so many openings of the copy one leaves a .wal behind; every other time it lies there until the next snapshot."""
_REPLACED_S = 20.0
PAUSE = 2
"""A reader rests for so many times as long as it has read, so that all of them together take no more than a core."""
_LEAVE = """
import os, sys, duckdb
connection = duckdb.connect(sys.argv[1])
connection.execute("CREATE OR REPLACE TABLE left_behind AS FROM run WHERE name = 'recorder.published_ns'")
os._exit(0)
"""
_FACTS = {
    "published_ns": "SELECT value::BIGINT FROM run WHERE name = 'recorder.published_ns'",
    "state": "SELECT value FROM run WHERE name = 'recorder.state'",
    "events": "SELECT count(*) FROM event",
    "newest_ns": "SELECT coalesce(max(t_ns), 0) FROM event",
    "requests": "SELECT count(*) FROM request",
    "arrived": "SELECT count(*) FROM request WHERE start_ns >= {since_ns}",
    # Written in one transaction each: of a whole snapshot neither finds anything.
    "untiled": "SELECT count(*) FROM request LEFT JOIN (SELECT request_key, sum(end_ns - start_ns) AS ns FROM segment "
    "GROUP BY request_key) USING (request_key) WHERE ttft_ns IS NOT NULL AND ttft_ns IS DISTINCT FROM ns",
    "homeless": "SELECT count(*) FROM event ANTI JOIN process USING (process)",
    "foreign": "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'left_behind'",
}
_IDS = "SELECT unnest([request_id, client_request_id]) FROM request WHERE start_ns >= {since_ns} ORDER BY start_ns, 1"
_LEFT = "SELECT value::BIGINT FROM left_behind"

_ended = False


def _end(*_: object) -> None:
    global _ended  # noqa: PLW0603 -- a signal has nowhere else to put it
    _ended = True


def say(**told: Any) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def rest(began_ns: int) -> None:
    """Rest after a reading that began then, unless this is the end."""
    end_s = time.monotonic() + PAUSE * (time.time_ns() - began_ns) / 1e9
    while not _ended and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.1))


def facts(ask: Ask, since_ns: int) -> dict[str, Any]:
    """Return what one snapshot says of itself."""
    found = {name: ask(sql.format(since_ns=since_ns))[0][0] for name, sql in _FACTS.items()}
    left_ns = ask(_LEFT)[0][0] if found.pop("foreign") else found["published_ns"]
    return {**found, "left_ns": left_ns}


def last(ask: Ask, asked: list[str], since_ns: int) -> dict[str, Any]:
    """Return what the last reading tells beside its facts: rows of each query, and the ids of all that has come."""
    rows = [len(ask(sql)) for sql in asked]
    return {"rows": rows, "ids": [row[0] for row in ask(_IDS.format(since_ns=since_ns)) if row[0]]}


def read_store(path: str, asked: list[str], since_ns: int) -> None:
    """Open snapshot after snapshot through kvtrace and ask everything of each."""
    from kvtrace.store import Store

    while True:
        ends, opened_ns = _ended, time.time_ns()
        with Store.open(path) as store:

            def ask(sql: str, store: Store = store) -> list[tuple[Any, ...]]:
                return store.select(sql).values

            before = facts(ask, since_ns)
            found = last(ask, asked, since_ns)
            same = facts(ask, since_ns) == before
        say(**before, same=same, took_s=(time.time_ns() - opened_ns) / 1e9, **(found if ends else {}))
        if ends:
            return
        rest(opened_ns)


class Copy:
    """A file that is kept open read-write until it is newer, as the plug-in keeps it."""

    def __init__(self, path: str, since_ns: int) -> None:
        self._path = path
        self._since_ns = since_ns
        self._connection: Any = None
        self._seen: tuple[int, int] | None = None
        self._openings = 0

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of one query, of the file that is there now."""
        if self._seen != self._identity():
            self.open()
        return self._rows(sql)

    def open(self) -> None:
        """Open the file anew and tell of it."""
        import duckdb

        self.close()
        self._openings += 1
        if self._openings % LEAVES_EVERY == 0:
            self._leave_a_log()
        self._seen = self._identity()
        self._connection = duckdb.connect(self._path)
        self._connection.execute("SET TimeZone = 'UTC'")
        say(**facts(self._rows, self._since_ns), left=os.path.exists(f"{self._path}.wal"))

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _identity(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_ino, status.st_mtime_ns

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._connection.execute(sql).fetchall()
        return rows

    def _leave_a_log(self) -> None:
        """Write into the file from a process that ends at once; a log of a file that was replaced meanwhile goes."""
        before = self._identity()[0]
        subprocess.run([sys.executable, "-c", _LEAVE, self._path], check=True, timeout=60)
        end_s = time.monotonic() + (_REPLACED_S if self._openings % (2 * LEAVES_EVERY) == 0 else 0.0)
        is_left = self._identity()[0] == before
        while is_left and self._identity()[0] == before and time.monotonic() < end_s and not _ended:
            time.sleep(0.05)
        if not is_left:
            # What writes while its file is replaced leaves its log beside the next one; the plug-in never writes.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}.wal")


def read_copy(path: str, asked: list[str], since_ns: int) -> None:
    """Ask one query after the other, each of the file that is there then."""
    copy = Copy(path, since_ns)
    for sql in _endlessly(asked):
        began_ns = time.time_ns()
        copy.ask(sql)
        rest(began_ns)
        if _ended:
            break
    copy.open()
    found = last(copy.ask, asked, since_ns)
    say(**facts(copy.ask, since_ns), **found)
    copy.close()


def _endlessly(asked: list[str]) -> Iterator[str]:
    while True:
        yield from asked


def main() -> None:
    """Read until told to end."""
    signal.signal(signal.SIGTERM, _end)
    how, path = sys.argv[1:]
    given = json.load(sys.stdin)
    {"store": read_store, "copy": read_copy}[how](path, given["asked"], given["since_ns"])


if __name__ == "__main__":
    main()
