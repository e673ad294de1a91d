"""The store's file is published whole or not at all and can be read by anybody meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvtrace.errors import StoreError
from kvtrace.store import Store, working_path
from kvtrace.store.files import copy_through
from tests.stores import ROOT, events, python


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


# Refusals --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("number", [None, errno.EXDEV, errno.ENOSYS, 0])
def test_a_copy_is_whole_whether_or_not_the_kernel_can_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    within = os.copy_file_range

    def copy(source: int, target: int, count: int, *places: int) -> int:
        if number:
            raise OSError(number, os.strerror(number))
        return 0 if number == 0 else within(source, target, min(count, 1_000_000), *places)

    monkeypatch.setattr(os, "copy_file_range", copy)
    path = tmp_path / "whole"
    path.write_bytes(os.urandom(9_000_001))
    source = os.open(path, os.O_RDONLY)
    copy_through(source, tmp_path / "copy")
    os.close(source)

    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


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
        out, _ = held.communicate("\n", timeout=120)
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
import sys
from kvtrace.store import Store
seen = last = 0
while seen < 6:
    with Store.open(sys.argv[1]) as store:
        rows = store.rows("SELECT request, count(*) AS n FROM event GROUP BY request")
    assert all(row["n"] == 10 for row in rows), rows
    assert len(rows) >= last, (len(rows), last)
    last, seen = len(rows), seen + (len(rows) > last)
print(last)
""", str(path)],
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
    out, err = reader.communicate()

    assert reader.returncode == 0, err
    assert 6 <= int(out) <= number


def test_a_snapshot_that_is_replaced_while_it_is_opened_is_opened_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB reads a file's headers and opens it once more for the rest, which may be the next snapshot's by then."""
    connect, connected = duckdb.connect, 0
    with Store.open(working_path(path), "write") as store:
        store.publish(path)

        def replacing(*arguments: Any, **options: Any) -> duckdb.DuckDBPyConnection:
            nonlocal connected
            connected += 1
            if connected == 1:
                store.append("event", events("a"))
                store.publish(path)
            return connect(*arguments, **options)

        monkeypatch.setattr(duckdb, "connect", replacing)
        with Store.open(path) as published:
            assert published.rows("SELECT count(*) AS n FROM event") == [{"n": 1}]

    assert connected == 2


def test_a_killed_writer_leaves_exactly_what_it_committed(path: Path) -> None:
    done = python(
        """
import sys, os
import pyarrow as pa
from kvtrace.store import Store
from tests.stores import events
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
