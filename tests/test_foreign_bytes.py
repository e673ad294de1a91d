"""Names and arguments in bytes that are no UTF-8, as a shell may hand them over: one clear line, or no harm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtrace import cli
from kvtrace.store import Store
from tests import import_records as records
from tests.recordings import numbers, record_once, write
from tests.trace import push

ODD = os.fsdecode(b"odd-\xff")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return records.recorded(tmp_path / "run.duckdb", push())


@pytest.fixture
def odd_store(store: Path) -> Path:
    """Return a copy of the store whose name is no UTF-8."""
    path = store.with_name(f"{ODD}.duckdb")
    path.write_bytes(store.read_bytes())
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return the exit code and the one line of a refusal."""
    code = cli.main([str(argument) for argument in arguments])
    streams = capsys.readouterr()
    (line,) = streams.err.splitlines()
    assert streams.out == ""
    assert "unexpected" not in line
    assert "Error:" not in line
    return code, line


@pytest.mark.parametrize(
    "arguments", [["explain"], ["sql", "--param", "mode=push"], ["upgrade"], ["import", "--into"], ["record", "-o"]]
)
def test_a_store_of_such_a_name_is_one_line(
    arguments: list[str], odd_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(entry.name for entry in tmp_path.iterdir())
    rest = {"sql": ["causes"], "import": [tmp_path / "run.duckdb"], "record": ["--", "true"]}.get(arguments[0], [])

    code, line = refused(capsys, *arguments, odd_store, *rest)

    assert code == 1
    assert line.startswith(f"kvtrace: error: {tmp_path}/odd-\\udcff.duckdb cannot be a store: its path is no UTF-8")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_a_store_of_such_a_name_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -1, 62, 100))

    code, line = refused(capsys, "import", "-o", tmp_path / f"{ODD}.duckdb", file)

    assert code == 1
    assert f"{tmp_path}/odd-\\udcff.duckdb cannot be a store" in line
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "RUN", ODD], "no request is called or begins with 'odd-\\udcff'"),
        (["sql", "RUN", ODD], "'odd-\\udcff' is no UTF-8"),
        (["sql", "RUN", f"SELECT '{ODD}'"], "is no UTF-8"),
        (["sql", "RUN", "SELECT $x", "--param", f"x={ODD}"], "'odd-\\udcff' is no UTF-8"),
        (["sql", "RUN", "causes", "--param", f"mode={ODD}"], "'odd-\\udcff' is no UTF-8"),
        (["sql", "RUN", "causes", "--param", f"{ODD}=1"], "has no parameter odd-\\udcff"),
    ],
)
def test_an_argument_of_such_bytes_is_one_line(
    arguments: list[str], said: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = refused(capsys, *(str(store) if word == "RUN" else word for word in arguments))

    assert code == (2 if "no parameter" in said else 1)
    assert said in line


def test_a_spool_folder_of_such_a_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ODD
    folder.mkdir()

    code, line = refused(capsys, "record", "-o", tmp_path / "run.duckdb", "--spool", folder, "--once")

    assert code == 1
    assert "odd-\\udcff: its path is no UTF-8" in line
    assert [entry.name for entry in tmp_path.iterdir()] == [ODD]


def test_a_file_of_such_a_name_in_a_spool_folder_is_named_and_costs_nothing(tmp_path: Path) -> None:
    spool, output = tmp_path / "spool", tmp_path / "run.duckdb"
    write(spool, 0, 3)
    (spool / f"{ODD}.kvt").write_bytes(b"garbage")

    record_once(output, spool)

    assert numbers(output) == [0, 1, 2]
    with Store.open(output) as opened:
        (said,) = opened.rows("SELECT subject, message FROM recorder")
    assert said["subject"] == f"{spool}/odd-\\udcff.kvt"
    assert "its name is no UTF-8" in said["message"]


def test_a_command_may_bear_such_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command gets the bytes themselves; the store shows them."""
    output, made = tmp_path / "run.duckdb", tmp_path / ODD

    assert cli.main(["record", "-o", str(output), "--", "touch", str(made)]) == 0, capsys.readouterr().err

    assert made.exists()
    with Store.open(output) as opened:
        (fact,) = opened.rows("SELECT value FROM run WHERE name = 'command'")
    assert fact["value"] == f"touch '{tmp_path}/odd-\\udcff'"


def test_a_file_to_import_may_bear_such_bytes(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records.write(tmp_path / f"{ODD}.jsonl", records.aiperf("r1", -1, 62, 100))

    assert cli.main(["import", "--into", str(store), str(file)]) == 0

    assert "odd-?.jsonl: 1 record of aiperf, 1 joined" in capsys.readouterr().err
