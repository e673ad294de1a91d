"""The snapshots that a recorder started anew finds: brought up to date, made whole, left to whoever reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtrace.store import Store, working_path
from tests.test_store_spare import COUNT, count, more


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def killed(path: Path) -> list[int]:
    """Leave what a killed recorder does; return the inodes of the snapshot before its last one, and of the last one."""
    with Store.open(working_path(path), "write") as store:
        for _ in range(3):
            more(store)
            store.publish(path)
    return [path.with_name("run.duckdb.spare").stat().st_ino, path.stat().st_ino]


def started_anew(path: Path) -> list[tuple[str | None, int]]:
    """Publish three times more; return what was gone through, and the inode in place. All of them are exact."""
    found = []
    with Store.open(working_path(path), "write") as store:
        for _ in range(3):
            more(store)
            found.append((store.publish(path), path.stat().st_ino))
            assert path.read_bytes() == store.path.read_bytes()
        store.finish(path)

    assert [entry.name for entry in path.parent.iterdir()] == ["run.duckdb"]
    return found


def test_a_recorder_started_anew_brings_the_snapshots_that_it_finds_up_to_date(path: Path) -> None:
    before, last = killed(path)

    assert started_anew(path) == [("whole", before), ("whole", last), ("changed", before)]


def test_a_torn_spare_of_a_killed_recorder_is_made_whole(path: Path) -> None:
    """However its blocks are torn: their checksums, with which they begin, may be those of whole ones."""
    before, last = killed(path)
    spare = path.with_name("run.duckdb.spare")
    torn = bytearray(spare.read_bytes())
    torn[20_000:30_000] = b"\x00" * 10_000
    spare.write_bytes(torn[: len(torn) - 100_000])

    assert started_anew(path) == [("whole", before), ("whole", last), ("changed", before)]


def test_a_recorder_killed_right_before_its_rename_leaves_a_ground_too(path: Path) -> None:
    before, last = killed(path)
    path.with_name("run.duckdb.spare").rename(path.with_name("run.duckdb.publishing"))
    os.link(path, path.with_name("run.duckdb.spare"))

    assert started_anew(path) == [("whole", before), ("whole", last), ("changed", before)]


def test_what_a_recorder_started_anew_finds_is_left_to_whoever_reads_it(path: Path) -> None:
    killed(path)
    with path.with_name("run.duckdb.spare").open("rb") as spare, path.open("rb") as reader:
        seen = path.with_name("run.duckdb.spare").read_bytes(), path.read_bytes()
        with Store.open(working_path(path), "write") as store:
            for _ in range(4):
                more(store)
                store.publish(path)
                assert count(path) == store.select(COUNT).values[0][0]
        assert (spare.read(), reader.read()) == seen


def test_all_of_a_snapshot_that_is_not_known_is_gone_through_only_where_that_is_paid_for(path: Path) -> None:
    killed(path)
    with Store.open(working_path(path), "write") as store:
        for _ in range(2):
            assert store.publish(path, whole=False) is None
            assert store.publish(path) == "whole"
        assert store.publish(path, whole=False) == "changed"
