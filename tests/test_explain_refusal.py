"""`kvtrace explain` on files that are no use: empty, foreign, cut short, damaged, older, missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from kvtrace import cli
from kvtrace.store import Store
from tests.sample_store import Sample


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


def make_text(path: Path) -> None:
    path.write_text("not a database\n" * 100)


def make_foreign(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE request (request_id VARCHAR)")


def make_cut(path: Path) -> None:
    whole = Sample()
    whole.add("kvt-1")
    whole.write(path)
    os.truncate(path, path.stat().st_size // 2)


def make_scribbled(path: Path) -> None:
    whole = Sample()
    whole.add("kvt-1")
    whole.write(path)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))


def make_older(path: Path) -> None:
    with Store.open(Sample().write(path), "write") as store:
        store.remember({"schema_version": "0"})


def make_folder(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_nothing(path: Path) -> None:
    assert not path.exists()


@pytest.mark.parametrize("json_too", [[], ["--json"]])
@pytest.mark.parametrize(
    "make",
    [make_empty, make_text, make_foreign, make_cut, make_scribbled, make_older, make_folder, make_pipe, make_nothing],
)
def test_a_file_that_is_no_use_is_one_clear_line(
    make: Callable[[Path], None],
    json_too: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KVTRACE_DEBUG", raising=False)
    path = tmp_path / "run.duckdb"
    make(path)

    code = cli.main(["explain", str(path), *json_too])
    out, err = capsys.readouterr()

    assert (code, out) == (1, "")
    assert err.startswith("kvtrace: error: ")
    assert err.count("\n") == 1
    assert "run.duckdb" in err
    assert "unexpected" not in err
