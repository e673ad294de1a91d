"""Standard streams that are closed, full or left by their reader.

A caller that closes a stream does not want what comes on it: the program ends as with /dev/null in its place. What
should have been printed and could not be is a failure. A message on stderr that nobody can hear is none: work that
is done counts as done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace.store import Store
from tests import import_records as records
from tests.trace import push

STDERR_UNHEARD = ["2>&-", "2>/dev/full"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return records.recorded(tmp_path / "run.duckdb", push())


def shell(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run kvtrace from a shell that redirects its streams so."""
    words = [sys.executable, "-m", "kvtrace", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *words], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "--json"], ["sql", "--csv"]])
def test_a_closed_stdout_ends_quietly(arguments: list[str], store: Path) -> None:
    done = shell(">&-", *arguments, store, *(["causes"] if arguments[0] == "sql" else []))

    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """A command that prints inherits the closed stream and not, under its number, the store."""
    output = tmp_path / "run.duckdb"

    done = shell("<&- >&-", "record", "-o", output, "--", "sh", "-c", "echo over the store; true")

    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr
    with Store.open(output) as opened:
        assert opened.rows("SELECT count(*) AS n FROM event") == [{"n": 0}]


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [(["explain"], True), (["explain"], False), (["explain", "--json"], True), (["sql", "causes"], False)],
)
def test_a_full_stdout_is_one_line_and_a_failure(
    arguments: list[str], buffered: bool, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    command, *rest = arguments

    done = shell(">/dev/full", command, store, *rest)

    assert done.returncode == 1
    assert done.stderr == (
        "kvtrace: error: the output cannot be written: No space left on device; make room, or send it elsewhere\n"
    )


@pytest.mark.parametrize("redirection", STDERR_UNHEARD)
def test_an_import_is_done_though_nobody_can_be_told(redirection: str, store: Path, tmp_path: Path) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -1, 62, 100))

    done = shell(redirection, "import", "--into", store, file)

    assert done.returncode == 0
    assert records.requests(store)["r1"]["scope"] == "client"


@pytest.mark.parametrize("redirection", STDERR_UNHEARD)
def test_a_recording_is_done_though_nobody_can_be_told(redirection: str, tmp_path: Path) -> None:
    output = tmp_path / "run.duckdb"

    done = shell(redirection, "record", "-o", output, "--", "sh", "-c", "echo it ran; exit 3")

    assert (done.returncode, done.stdout) == (3, "it ran\n")
    with Store.open(output) as opened:
        assert opened.rows("SELECT count(*) AS n FROM request") == [{"n": 0}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.duckdb"]


def test_a_recording_goes_on_when_the_reader_of_its_messages_goes(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "kvtrace", "record", "-o", str(tmp_path / "run.duckdb"), "--", "sh", "-c", "exit 3"]

    done = subprocess.run(words, stderr=write_end, check=False, timeout=60)
    os.close(write_end)

    assert done.returncode == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.duckdb"]


@pytest.mark.parametrize("redirection", STDERR_UNHEARD)
@pytest.mark.parametrize(("arguments", "code"), [(["explain", "missing.duckdb"], 1), (["explain"], 2), ([], 2)])
def test_a_failure_keeps_its_exit_code_though_nobody_can_be_told(
    redirection: str, arguments: list[str], code: int
) -> None:
    assert shell(redirection, *arguments).returncode == code
