"""A snapshot is made from an earlier one by what has changed, and never from one that somebody still has."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

from kvtrace.store import Store, publication, working_path
from kvtrace.store.publication import checksums, copy_changed
from tests.stores import ROOT, events

if TYPE_CHECKING:
    from collections.abc import Iterator


COUNT = "SELECT count(*) FROM event"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(working_path(path), "write") as opened:
        yield opened


def more(store: Store, name: str = "a", count: int = 1) -> None:
    store.append("event", pa.concat_tables([events(name)] * count))


def count(path: Path) -> int:
    with Store.open(path) as opened:
        return int(opened.select(COUNT).values[0][0])


def test_the_third_snapshot_is_the_first_brought_up_to_date(path: Path, store: Store) -> None:
    inodes, extents = [], []
    for number in range(6):
        more(store)
        extents.append(store.publish(path))
        inodes.append(path.stat().st_ino)
        assert count(path) == number + 1

    assert extents == ["whole", "whole", "changed", "changed", "changed", "changed"]
    assert inodes[2:] == [inodes[0], inodes[1], inodes[0], inodes[1]]


def test_little_is_written_where_little_has_changed(path: Path, store: Store, tmp_path: Path) -> None:
    store.execute(
        "INSERT INTO event SELECT 1, 'router.received', i, md5(i::VARCHAR), '', 0, 0, 0, 0 FROM range(500000) t(i)"
    )
    store.execute("CHECKPOINT")
    copy = tmp_path / "copy.duckdb"
    copy.write_bytes(store.path.read_bytes())
    more(store)
    store.execute("CHECKPOINT")
    source, target = os.open(store.path, os.O_RDONLY), os.open(copy, os.O_RDWR)
    try:
        changed = len(copy_changed(source, target, (), checksums(target), checksums(source)))
        assert copy_changed(source, target, (), checksums(target), checksums(source)) == []
    finally:
        os.close(target)

    blocks = store.path.stat().st_size // 262_144
    assert blocks > 40
    assert 0 < changed < blocks / 3
    assert copy.read_bytes() == store.path.read_bytes()
    assert count(copy) == 500_001


@pytest.mark.parametrize("are_known", [False, True])
def test_values_that_change_places_change_the_snapshot(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, *, are_known: bool
) -> None:
    """DuckDB's checksum stays the same then; those blocks are known to have changed lately, or have their turn."""
    if are_known:
        monkeypatch.setattr(publication, "_IN_TURN", 0)
        store.publish(path)
        store.publish(path)
    store.execute(
        "INSERT INTO event SELECT 1, 'router.received', 0, '', '', hash(i) // 2, 0, 0, 0 FROM range(40000) t(i)"
    )
    extents = []
    for number in range(6):
        places = (1000 + number, 2000 + number)
        for row, value in [
            (other, store.select("SELECT a FROM event WHERE rowid = $row", {"row": row}).values[0][0])
            for row, other in (places, reversed(places))
        ]:
            store.execute("UPDATE event SET a = $value WHERE rowid = $row", {"value": value, "row": row})
        extents.append(store.publish(path))
        assert path.read_bytes() == store.path.read_bytes(), number

    assert extents[2:] == ["changed"] * 4


def test_a_snapshot_is_not_read_again_unless_somebody_has_written_to_it(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.execute(
        "INSERT INTO event SELECT 1, 'router.received', i, md5(i::VARCHAR), '', 0, 0, 0, 0 FROM range(300000) t(i)"
    )
    monkeypatch.setattr(publication, "_IN_TURN", 0)
    read = []

    def looked(descriptor: int) -> list[bytes]:
        read.append(os.fstat(descriptor).st_ino)
        return checksums(descriptor)

    monkeypatch.setattr(publication, "checksums", looked)
    for number in range(6):
        more(store)
        if number == 4:
            with path.open("r+b") as file:
                file.seek(12_288 + 10 * 262_144)
                file.write(bytes(262_144))
        assert store.publish(path) == ("changed" if number > 1 else "whole")
        assert path.read_bytes() == store.path.read_bytes(), number

    of_store = store.path.stat().st_ino
    assert [inode == of_store for inode in read] == [True] * 6 + [False]


def test_whoever_opens_a_snapshot_while_it_is_brought_up_to_date_waits(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has looked the name up and opens the file two publications later must not see half of it."""
    refused = []
    more(store)
    store.publish(path)
    found = os.open(path, os.O_PATH)  # looked up, and not open yet
    more(store)
    store.publish(path)

    def copy(source: int, target: int, *known: Any) -> list[int]:
        try:
            os.close(os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK))
        except BlockingIOError:
            refused.append("waits")
        return copy_changed(source, target, *known)

    monkeypatch.setattr(publication, "copy_changed", copy)
    assert store.publish(path) == "changed"
    os.close(os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK))
    os.close(found)

    assert refused == ["waits"]


def test_whoever_has_a_snapshot_open_keeps_it(path: Path, store: Store) -> None:
    """Not only DuckDB: a program that copies the file reads the same bytes to its end, however slow it is."""
    more(store)
    store.publish(path)
    with path.open("rb") as slow, duckdb.connect(str(path), read_only=True) as reader:
        first = slow.read(4096)
        seen = path.read_bytes()
        for _ in range(2):
            more(store)
            assert store.publish(path) == "whole"
        assert store.publish(path, whole=False) is not None  # those two are nobody's
        for _ in range(3):
            more(store, count=50)
            store.publish(path)
        assert reader.execute(COUNT).fetchall() == [(1,)]
        assert first + slow.read() == seen

    assert count(path) == 153


def test_a_snapshot_that_somebody_reads_is_waited_for_where_copying_it_whole_is_too_much(
    path: Path, store: Store
) -> None:
    for _ in range(2):
        more(store)
        store.publish(path)
    spare = path.with_name("run.duckdb.spare")
    with spare.open("rb"):
        more(store)
        assert store.publish(path, whole=False) is None
        assert count(path) == 2
    assert store.publish(path, whole=False) == "changed"
    assert count(path) == 3


def test_a_second_name_that_somebody_gave_a_snapshot_stays_what_it_was(
    path: Path, store: Store, tmp_path: Path
) -> None:
    more(store)
    store.publish(path)
    kept = tmp_path / "kept.duckdb"
    os.link(path, kept)
    for _ in range(4):
        more(store)
        store.publish(path)

    assert count(kept) == 1
    assert count(path) == 5


def test_what_another_program_wrote_into_a_snapshot_is_not_in_a_later_one(path: Path, store: Store) -> None:
    """Grafana's plug-in opens its copy for writing; a curious user may change it."""
    for _ in range(4):
        more(store)
        store.publish(path)
        with duckdb.connect(str(path)) as curious:
            curious.execute("CREATE TABLE mine AS FROM range(100000)")
            curious.execute("DELETE FROM event")
            curious.execute("CHECKPOINT")
    more(store)
    store.publish(path)

    assert count(path) == 5
    with duckdb.connect(str(path), read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'mine'").fetchall() == [(0,)]
        assert path.read_bytes()[:12] == store.path.read_bytes()[:12]


def test_a_file_that_somebody_else_put_there_is_replaced_and_not_written_into(
    path: Path, store: Store, tmp_path: Path
) -> None:
    more(store)
    store.publish(path)
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    os.replace(other, path)
    holder = path.open("rb")
    for _ in range(3):
        store.publish(path)

    assert holder.read() == b"mine"
    holder.close()
    assert count(path) == 1


def test_a_program_that_opens_for_writing_meets_whole_snapshots_only(path: Path, store: Store) -> None:
    """As Grafana's plug-in does: it opens read-write, asks, opens again when the file is newer.

    DuckDB opens a file more than once for a connection: one during which the file was replaced does not count.
    """
    store.publish(path)
    plugin = subprocess.Popen(
        [sys.executable, "-c", """
import os, sys, time, duckdb
path, end_s = sys.argv[1], time.monotonic() + 120
seen = last = 0
while seen < 6 and time.monotonic() < end_s:
    at = os.stat(path).st_mtime_ns
    try:
        connection = duckdb.connect(path)
    except duckdb.Error:
        assert os.stat(path).st_mtime_ns != at
        continue
    with connection:
        if os.stat(path).st_mtime_ns != at:
            continue
        newer = False
        while not newer and time.monotonic() < end_s:
            rows = connection.execute("SELECT request, count(*) FROM event GROUP BY request").fetchall()
            assert all(count == 10 for _, count in rows), rows
            assert len(rows) >= last, (len(rows), last)
            last = len(rows)
            time.sleep(0.02)
            newer = os.stat(path).st_mtime_ns != at
    seen += 1
print(seen, last)
""", str(path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    number, extents = 0, []
    while plugin.poll() is None:
        with store.transaction():
            store.append("event", events(*[f"r{number}"] * 10))
        number += 1
        extents.append(store.publish(path))
        time.sleep(0.1)
    out, err = plugin.communicate(timeout=120)

    assert plugin.returncode == 0, err
    opened, last = map(int, out.split())
    assert opened == 6
    assert 0 < last <= number
    assert "changed" in extents
