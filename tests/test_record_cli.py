"""`kvtrace record` of a command as a user runs it: real commands, real emitters, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kvtrace import child, cli
from tests import exported
from tests.recorded_commands import answer, events, run, spool_of, start
from tests.trace import push
from tests.waiting import LONG_S

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def test_a_command_is_recorded_and_keeps_its_output_and_exit_code(tmp_path: Path, emitter: list[str]) -> None:
    store = tmp_path / "run.duckdb"
    ended = run("-o", store, "--", *emitter, "3", "0", "7")
    assert (ended.returncode, ended.stdout) == (7, "0\n1\n2\n")
    assert events(store) == 9
    assert answer(store, "SELECT value FROM run WHERE name = 'command'").endswith("emitter.py 3 0 7")
    wrote, following = ended.stderr.splitlines()[-2:]
    assert wrote.startswith(f"kvtrace: wrote {store}: 3 requests, ")
    assert following == f"kvtrace: next: kvtrace explain {store}"
    assert spool_of(ended.stderr).name.startswith("kvtrace-spool-")
    assert not spool_of(ended.stderr).exists(), "the private folder is removed"


def test_options_of_the_command_are_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), "echo", "--force", "-o", "x"]) == 0
    assert capfd.readouterr().out == "--force -o x\n"


def test_a_signal_reaches_the_command_and_the_store_is_whole(tmp_path: Path, emitter: list[str]) -> None:
    store = tmp_path / "run.duckdb"
    process = start("-o", store, "--", *emitter, "1000", "0.1", "0")
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 143
    assert events(store) >= 3 * (3 + len(out.splitlines()))


def test_an_existing_store_is_overwritten_only_with_force(
    tmp_path: Path, emitter: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    store = exported.write(tmp_path / "run.duckdb", push())
    before = store.read_bytes()
    assert cli.main(["record", "-o", str(store), "--", *emitter, "2", "0", "0"]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--force" in err
    assert store.read_bytes() == before
    assert run("-o", store, "--force", "--", *emitter, "2", "0", "0").returncode == 0
    assert events(store) == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "found none"),
        (["--lab", "push", "--", "true"], "found more than one"),
        (["--lab", "push", "--spool", "."], "found more than one"),
        (["--lab", "shove"], "push or pull"),
        (["--seed", "5", "--", "true"], "--seed belongs to --lab"),
        (["--rate", "5", "--spool", "."], "--rate belongs to --lab"),
        (["--prefill", "2", "--", "true"], "--prefill belongs to --lab"),
        (["--once", "--", "true"], "--once belongs to --spool"),
        (["--lab", "push", "--requests", "0"], "at least 1"),
        (["--requests", "many"], "--requests wants a whole number"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["record", *arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--once", "--spool", "/no/such/folder"], "/no/such/folder does not exist"),
        (["--spool", "/etc/passwd"], "not a folder"),
    ],
)
def test_a_folder_that_is_not_there_is_one_line_and_exit_code_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    """As a store that is not there: the command line is right."""
    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), *arguments]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert list(tmp_path.glob("run*")) == []


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("exit 3", 3, "the command ended with exit code 3 before any engine wrote an event: what it printed says why"),
        ("kill $$", 143, "no event arrived: no vLLM process in whose environment kvtrace is installed"),
        ("true", 0, "no event arrived: no vLLM process in whose environment kvtrace is installed"),
    ],
)
def test_a_command_that_started_no_engine_is_said_to_have_failed_if_it_did(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, code: int, says: str
) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), "--", "sh", "-c", command]) == code
    lines = capfd.readouterr().err.splitlines()
    _recording, said, wrote = [line for line in lines if "command line does not start vLLM" not in line]
    assert said.startswith(f"kvtrace: {says}")
    assert "0 requests" in wrote


def test_a_command_that_failed_before_it_served_anything_is_told_from_one_that_started_nothing(
    tmp_path: Path, emitter: list[str]
) -> None:
    ended = run("-o", tmp_path / "run.duckdb", "--", *emitter, "0", "0", "9")
    said = [line for line in ended.stderr.splitlines() if "the command ended" in line]
    assert said == [
        "kvtrace: the command ended with exit code 9 before any request was served: what it printed says why"
    ]


@pytest.mark.parametrize(
    ("output", "argv", "code", "says"),
    [
        ("run.duckdb", ["no-such-program"], 127, "command not found: no-such-program"),
        ("run.duckdb", ["/etc/passwd"], 126, "not executable"),
        ("missing/run.duckdb", ["touch", "started"], 1, "missing does not exist"),
        (".", ["touch", "started"], 1, "is a folder"),
    ],
)
def test_nothing_is_started_or_written_where_it_cannot_end_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    output: str,
    argv: list[str],
    code: int,
    says: str,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["record", "-o", output, "--", *argv]) == code
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert says in err
    assert list(Path().iterdir()) == []


def test_the_default_name_says_what_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["record", "--", "/bin/true"]) == 0
    (store,) = tmp_path.glob("kvtrace-true-*.duckdb")
    time.strptime(store.stem.removeprefix("kvtrace-true-"), "%Y%m%d-%H%M%S")


@pytest.mark.parametrize("place", ["recording.platform.node", "schema.ddl"])
def test_a_command_that_is_stopped_before_it_begins_leaves_nothing(
    tmp_path: Path, own_temporary_folder: Path, place: str
) -> None:
    """The signal comes while the recorder is made, or its store."""
    module, _, name = place.rpartition(".")
    early = f"""
import os, pathlib, signal, sys
from kvtrace import schema
from kvtrace.cli import main, recording
made = {place}
def stopped():
    os.kill(os.getpid(), signal.SIGTERM)
    return made()
{module}.{name} = stopped
recording._SHARED_MEMORY = pathlib.Path("/none")
sys.exit(main(["record", "-o", {str(tmp_path / "run.duckdb")!r}, "--", "true"]))
"""
    ended = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, check=False, timeout=LONG_S)

    assert (ended.returncode, ended.stderr) == (143, "")
    assert [*tmp_path.glob("run.duckdb*"), *own_temporary_folder.iterdir()] == []


def test_where_ends_of_children_are_ignored_the_exit_code_is_the_commands(tmp_path: Path, emitter: list[str]) -> None:
    ignoring = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    ended = run("-o", tmp_path / "run.duckdb", "--", *emitter, "2", "0", "7", preexec_fn=ignoring)

    assert ended.returncode == 7, ended.stderr
    assert "cannot execute" not in ended.stderr


def test_a_command_of_another_user_is_waited_for_although_it_may_not_be_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError

    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, refuse)
    command = child._Child(["sudo"], {}, pid=1)
    for number in (signal.SIGTERM, signal.SIGINT):
        command._hand_on(number, None)

    assert command.terminated


def test_a_command_is_recorded_where_the_labs_parts_are_missing(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['kvtrace.lab'] = None; from kvtrace.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", blocked, "record", "-o", str(tmp_path / "run.duckdb"), "--", "true"], check=False
    )
    assert ended.returncode == 0


def test_a_rate_of_checking_needs_engines_to_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "x"), "--spool", str(tmp_path), "--verify-kv", "0.1"]) == 2
    assert "set KVTRACE_VERIFY_KV where engines start" in capfd.readouterr().err
