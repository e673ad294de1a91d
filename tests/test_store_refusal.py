"""Files that are no store, or none of ours, or damaged: each refused in one clear line."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import pytest

from kvtrace import schema
from kvtrace.errors import StoreError
from kvtrace.store import Store, working_path
from tests.stores import events, python


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def refusal(path: Path) -> str:
    """Return the one line with which the store at `path` is refused."""
    with pytest.raises(StoreError) as caught:
        Store.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_missing_file(path: Path) -> None:
    assert "does not exist; name a store that a recording wrote; `kvtrace record --help` shows" in refusal(path)


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


def test_a_file_cut_short_is_refused_and_never_a_crash(path: Path) -> None:
    """Wherever it is cut: an error of ours when it is opened or read, in a process that survives them all."""
    with Store.open(path, "write") as store:
        store.append("event", events(*(f"request {i}" for i in range(50_000))))
    whole, cut = path.read_bytes(), []
    for part in (0.001, 0.05, 0.3, 0.6, 0.9, 0.999):
        cut.append(path.with_name(f"cut-{part}.duckdb"))
        cut[-1].write_bytes(whole[: int(len(whole) * part)])

    done = python(
        """
import sys
from kvtrace.errors import DamageError
from kvtrace.store import Store
for path in sys.argv[1:]:
    try:
        with Store.open(path) as store:
            store.rows("SELECT count(DISTINCT request), sum(t_ns) FROM event")
            store.rows("SELECT * FROM ttft")
    except DamageError as error:
        print(error)
""",
        *cut,
    )

    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(cut)
    assert all(str(one) in line for one, line in zip(cut, said, strict=True))


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


def test_a_folder_that_goes_away_while_its_store_is_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with Store.open(folder / "run.duckdb", "write") as store:
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match=r"run\.duckdb cannot be written further: .*; see to its folder"):
            store.remember({"a": "b"})
