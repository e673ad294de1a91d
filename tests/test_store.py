"""The store's file: published whole or not at all, readable by anybody, refused in one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import duckdb
import pyarrow as pa
import pytest

from kvtrace import schema
from kvtrace.errors import KvtraceError, QueryError, StoreError
from kvtrace.store import Store, discard, working_path

ROOT = Path(__file__).parent.parent
HOSTILE = [
    'it\'s "quoted"',
    "'; DROP TABLE event; --",
    "a\x00b\x01\x1b[31m\r\n\t",
    "é 漢 🦆 \u202e",
    "x" * 4096,
    "$1 {} %s \\",
    "",
]


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blank") / "run.duckdb"
    Store.open(path, "write").close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def events(*requests: str, first: int = 0) -> pa.Table:
    count = len(requests)
    return pa.table(
        {
            "process": pa.array([1] * count, pa.int32()),
            "stage": ["step.started"] * count,
            "t_ns": list(range(first, first + count)),
            "request": list(requests),
            "ref": [""] * count,
            **{slot: [0] * count for slot in "abcd"},
        }
    )


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, where DuckDB's file locks count."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def refusal(path: Path) -> str:
    """Return the one line with which the store at `path` is refused."""
    with pytest.raises(StoreError) as caught:
        Store.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Refusals --------------------------------------------------------------------------------------------


def test_a_missing_file(path: Path) -> None:
    assert "does not exist; `kvtrace record -o" in refusal(path)


def test_a_store_whose_recorder_has_not_published_yet(path: Path) -> None:
    Store.open(working_path(path), "write").close()

    assert "has not been published yet" in refusal(path)


def test_an_empty_file(path: Path) -> None:
    path.touch()

    assert "is empty" in refusal(path)


def test_a_file_that_is_not_duckdb(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\x00" * 1000)

    assert "is not a DuckDB file" in refusal(path)


def test_a_folder(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in refusal(tmp_path)


def test_a_duckdb_file_of_somebody_else(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE run (name VARCHAR, value VARCHAR); INSERT INTO run VALUES ('a', 'b')")

    assert "is a DuckDB file but no kvtrace store" in refusal(path)


def set_schema(path: Path, version: int) -> None:
    Store.open(path, "write").close()
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE run SET value = $v WHERE name = 'schema_version'", {"v": str(version)})
        connection.execute("UPDATE run SET value = '0.0.9' WHERE name = 'kvtrace'")


def test_an_older_schema_says_what_to_do(path: Path) -> None:
    set_schema(path, schema.SCHEMA_VERSION - 1)

    assert "older schema" in refusal(path)
    assert f"of kvtrace 0.0.9; this is schema {schema.SCHEMA_VERSION}: `kvtrace upgrade {path}`" in refusal(path)


def test_a_newer_schema_says_what_to_do(path: Path) -> None:
    set_schema(path, schema.SCHEMA_VERSION + 1)

    assert "newer schema" in refusal(path)
    assert "upgrade kvtrace" in refusal(path)


@pytest.mark.parametrize("part", [0.001, 0.05, 0.3, 0.6, 0.9, 0.999])
def test_a_file_cut_short_is_refused_and_never_a_crash(path: Path, part: float) -> None:
    """Wherever it is cut: an error of ours when it is opened or read, in a process that survives."""
    with Store.open(path, "write") as store:
        store.append("event", events(*(f"request {i}" for i in range(50_000))))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])

    done = python(
        """
import sys
from kvtrace.errors import DamageError
from kvtrace.store import Store
try:
    store = Store.open(sys.argv[1])
    store.rows("SELECT count(DISTINCT request), sum(t_ns) FROM event")
    store.rows("SELECT * FROM ttft")
except DamageError as error:
    print(error)
""",
        path,
    )

    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout
    assert done.stdout.count("\n") == 1


def test_random_bytes_in_the_middle_are_refused_and_never_a_crash(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.append("event", events(*(f"request {i}" for i in range(50_000))))
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) * 2 // 3] = os.urandom(len(data) * 2 // 3 - len(data) // 3)
    path.write_bytes(data)

    done = python(
        "import sys; from kvtrace.errors import StoreError; from kvtrace.store import Store\n"
        "try:\n    Store.open(sys.argv[1]).rows('SELECT count(DISTINCT request) FROM event')\n"
        "except StoreError as error:\n    print(error)\n",
        path,
    )

    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout


def test_a_working_file_in_use_names_the_published_one(path: Path) -> None:
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
        done = python("import sys; from kvtrace.store import Store; Store.open(sys.argv[1])", working_path(path))

    assert f"is still being written by process {os.getpid()}; its published snapshot is {path}" in done.stderr


def test_two_recorders_cannot_write_one_store(path: Path) -> None:
    with Store.open(working_path(path), "write"):
        done = python(
            "import sys; from kvtrace.store import Store; Store.open(sys.argv[1], 'write')", working_path(path)
        )

    assert "StoreError" in done.stderr
    assert "is still being written by process" in done.stderr


# Publishing ------------------------------------------------------------------------------------------


def test_publication_keeps_the_writers_lock(path: Path) -> None:
    """Reading one's own file and closing it would give DuckDB's POSIX lock away; it has to hold afterwards."""
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
        store.publish(path)
        done = python("import sys, duckdb; duckdb.connect(sys.argv[1])", working_path(path))

    assert "Could not set lock" in done.stderr


def test_a_published_store_can_be_held_open_by_anybody(path: Path) -> None:
    """A reader keeps the snapshot it opened; a program that opens it for writing does not stop the next one."""
    with Store.open(working_path(path), "write") as store:
        store.append("event", events("a"))
        store.publish(path)
        held = subprocess.Popen(
            [sys.executable, "-c", "import sys, duckdb; c = duckdb.connect(sys.argv[1]); print('open', flush=True);"
             "input(); print(c.execute('SELECT count(*) FROM event').fetchone()[0])", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert held.stdout.readline() == "open\n"
        store.append("event", events("b"))
        store.publish(path)
        out, _ = held.communicate("\n", timeout=30)
    with Store.open(path) as published:
        rows = published.rows("SELECT request FROM event ORDER BY t_ns, request")

    assert out == "1\n"
    assert [row["request"] for row in rows] == ["a", "b"]


def test_a_leftover_log_is_not_replayed_into_the_next_snapshot(path: Path) -> None:
    """A killed program that had opened the snapshot read-write (Grafana's plug-in does) leaves a .wal beside it."""
    wal = path.with_name(path.name + ".wal")
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
        killed = python(
            "import sys, os, duckdb; c = duckdb.connect(sys.argv[1]); c.execute(\"INSERT INTO run VALUES ('x', 'y')\");"
            "os.kill(os.getpid(), 9)",
            path,
        )
        assert killed.returncode == -9
        assert wal.exists()
        store.publish(path)
    with Store.open(path) as published:
        rows = published.rows("SELECT * FROM run WHERE name = 'x'")

    assert rows == []
    assert not wal.exists()


def test_finishing_leaves_one_file(path: Path) -> None:
    store = Store.open(working_path(path), "write")
    store.publish(path)
    store.append("event", events("a"))
    store.finish(path)

    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert Store.open(path).rows("SELECT count(*) AS n FROM event") == [{"n": 1}]


def test_a_failed_publication_leaves_the_last_one_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
        store.append("event", events("a"))
        monkeypatch.setattr(os, "fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StoreError, match="could not be published: No space left on device"):
            store.publish(path)
        monkeypatch.undo()

        assert Store.open(path).rows("SELECT count(*) AS n FROM event") == [{"n": 0}]
        assert {entry.suffix for entry in path.parent.iterdir()} <= {".duckdb", ".working", ".wal"}


def test_readers_see_only_whole_snapshots(path: Path) -> None:
    """Each transaction adds ten rows of one request; no reader may ever see a part of them, or fewer than before."""
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
    reader = subprocess.Popen(
        [sys.executable, "-c", """
import sys, time
from kvtrace.store import Store
seen = last = 0
while time.monotonic() < float(sys.argv[2]):
    with Store.open(sys.argv[1]) as store:
        rows = store.rows("SELECT request, count(*) AS n FROM event GROUP BY request")
    assert all(row["n"] == 10 for row in rows), rows
    assert len(rows) >= last, (len(rows), last)
    last, seen = len(rows), seen + 1
print(seen, last)
""", str(path), str(time.monotonic() + 6)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with Store.open(working_path(path), "write") as store:
        number = 0
        while reader.poll() is None:
            with store.transaction():
                for _ in range(2):
                    store.append("event", events(*[f"r{number}"] * 5))
            number += 1
            store.publish(path)
    out, err = reader.communicate(timeout=30)

    assert reader.returncode == 0, err
    opened, last = map(int, out.split())
    assert opened > 3
    assert 0 < last <= number


def test_a_killed_writer_leaves_exactly_what_it_committed(path: Path) -> None:
    done = python(
        """
import sys, os
import pyarrow as pa
from kvtrace.store import Store
from tests.test_store import events
store = Store.open(sys.argv[1], "write")
with store.transaction():
    store.append("event", events("a", "b"))
store.execute("BEGIN TRANSACTION")
store.append("event", events("c"))
os.kill(os.getpid(), 9)
""",
        path,
    )
    assert done.returncode == -9, done.stderr

    with Store.open(path, "write") as store:
        assert [row["request"] for row in store.rows("SELECT request FROM event ORDER BY t_ns")] == ["a", "b"]


# Contents --------------------------------------------------------------------------------------------


def test_hostile_strings_come_back_as_they_went_in(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.append("event", events(*HOSTILE))
        store.remember({text or "empty": text for text in HOSTILE})
        found = [row["request"] for row in store.rows("SELECT request FROM event ORDER BY t_ns")]
        by_text = [len(store.rows("SELECT * FROM event WHERE request = $r", {"r": text})) for text in HOSTILE]
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}

    assert found == HOSTILE
    assert by_text == [1] * len(HOSTILE)
    assert all(facts[text or "empty"] == text for text in HOSTILE)


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    with Store.open(path, "write") as store:
        with pytest.raises(QueryError), store.transaction():  # noqa: PT012 -- the second statement is the one that fails
            store.append("event", events("a"))
            store.execute("INSERT INTO event (stage) VALUES ('no.such')")
        with store.transaction():
            store.append("event", events("b"))

        assert [row["request"] for row in store.rows("SELECT request FROM event")] == ["b"]


def test_a_fact_is_written_in_place_of_its_earlier_value(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.remember({"mode": "push"})
        store.remember({"mode": "pull"})

        assert store.rows("SELECT value FROM run WHERE name = 'mode'") == [{"value": "pull"}]


def test_forgetting_requests_takes_their_segments_along(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.append("request", pa.table({"request_key": [1, 2], "request_id": ["a", "b"]}))
        store.append("segment", pa.table({"request_key": [1, 2], "cause": ["wire", "post"]}))
        store.append("hidden", pa.table({"request_key": [1, 2], "cause": ["registration", "registration"]}))
        store.forget_requests(pa.table({"request_id": ["a", "c"]}))

        assert store.next_request_key() == 3
        for table in ("request", "segment", "hidden"):
            assert store.rows(f"SELECT request_key FROM {table}") == [{"request_key": 2}]  # noqa: S608


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM run",
        "DROP TABLE event",
        "ATTACH '{other}' AS other",
        "COPY (SELECT 1) TO '{other}'",
        "EXPORT DATABASE '{other}'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM secret_of_the_caller",
    ],
)
def test_a_query_reaches_nothing_but_the_store(blank: Path, tmp_path: Path, sql: str) -> None:
    secret_of_the_caller = pa.table({"a": [1]})
    before = blank.read_bytes()
    other = tmp_path / "other"
    with Store.open(blank) as store, pytest.raises(KvtraceError):
        store.select(sql.format(other=other))

    assert blank.read_bytes() == before
    assert not other.exists()
    assert secret_of_the_caller.num_rows == 1


def test_a_refused_query_is_one_line(path: Path) -> None:
    Store.open(path, "write").close()
    with Store.open(path) as store, pytest.raises(QueryError) as caught:
        store.select("SELECT\n  nonsense FROM event")

    assert "\n" not in str(caught.value)
    assert "nonsense" in str(caught.value)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_long_query_draws_nothing_on_stdout(path: Path, mode: Literal["read", "write"]) -> None:
    """DuckDB 2 shows a progress bar after two seconds, in the middle of what a program reads as JSON."""
    Store.open(path, "write").close()
    with Store.open(path, mode) as store:
        assert store.rows("SELECT current_setting('enable_progress_bar') AS shown") == [{"shown": False}]


def test_times_come_in_utc_whatever_the_machine_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with Store.open(path, "write") as store:
        store.append("event", events("a", first=1_700_000_000_123_456_789))
    with Store.open(path) as store:
        rows = store.rows("SELECT ts FROM event_named")

    assert rows[0]["ts"].isoformat() == "2023-11-14T22:13:20.123456+00:00"


# Other versions of DuckDB ----------------------------------------------------------------------------


def test_the_file_has_the_storage_format_of_duckdb_1_0(path: Path) -> None:
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
    with Store.open(path) as store:
        tags = store.rows("SELECT tags['storage_version'] AS v FROM duckdb_databases() WHERE database_name = 'run'")

    assert tags[0]["v"].startswith("v1.0.0")


def test_duckdb_1_reads_a_published_store(path: Path, tmp_path: Path) -> None:
    """The DuckDB inside Grafana's plug-in is a 1.x: it answers from the tables and from the views."""
    target = tmp_path / "old"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "duckdb==1.5.5"]
    if subprocess.run(install, capture_output=True, timeout=120, check=False).returncode != 0:
        pytest.skip("duckdb 1.5.5 cannot be installed here")
    with Store.open(working_path(path), "write") as store:
        store.append("event", events(*(f"request {i}" for i in range(3000))))
        store.publish(path)
    views = ",".join(view.name for view in schema.VIEWS)
    code = """
import sys, duckdb
assert duckdb.__version__ == "1.5.5", duckdb.__version__
connection = duckdb.connect(sys.argv[1], read_only=True)
print(connection.execute("SELECT count(*), count(DISTINCT request) FROM event").fetchone())
for view in sys.argv[2].split(","):
    connection.execute(f"SELECT count(*) FROM {view}").fetchone()
print(connection.execute("SELECT count(*) FROM duckdb_columns() WHERE comment IS NULL AND NOT internal").fetchone())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), views],
        env={**os.environ, "PYTHONPATH": str(target)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3000, 3000)\n(0,)\n"


def test_discarding_takes_all_that_a_store_left(path: Path) -> None:
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
    path.with_name(path.name + ".wal").touch()
    discard(path)

    assert list(path.parent.iterdir()) == []
