"""`kvtrace record` of spool folders: taken in once, followed until interrupted, completed after a kill."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtrace import cli
from kvtrace.cli import recording
from tests.recorded_commands import answer, events, run, start
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def test_once_takes_what_is_there_and_leaves_it_there(tmp_path: Path, emitter: list[str]) -> None:
    spool = tmp_path / "spool"
    subprocess.run(
        [*emitter, "2", "0", "0"],
        env={**os.environ, "KVTRACE_SPOOL": str(spool)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for name in ("a.duckdb", "b.duckdb"):
        assert cli.main(["record", "-o", str(tmp_path / name), "--spool", str(spool), "--once"]) == 0
        assert events(tmp_path / name) == 6


def test_folders_are_followed_until_interrupted_and_the_store_is_readable_meanwhile(
    tmp_path: Path, emitter: list[str]
) -> None:
    store, spools = tmp_path / "run.duckdb", [tmp_path / "one", tmp_path / "two"]
    follower = start("-o", store, "--spool", spools[0], "--spool", spools[1])
    until(store.exists)
    for spool in spools:
        subprocess.run(
            [*emitter, "2", "0", "0"],
            env={**os.environ, "KVTRACE_SPOOL": str(spool)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    until(lambda: events(store) == 12)
    follower.send_signal(signal.SIGINT)
    assert follower.wait(LONG_S) == 0
    assert follower.stderr is not None
    said = follower.stderr.read()
    assert [f"{spool} was not there and has been made" in said for spool in spools] == [True, True]
    assert f"`kvtrace record -o {store} --spool {spools[0]} --spool {spools[1]}` completes it" in said
    assert answer(store, "SELECT count(*) FROM process") == 2
    assert [list(spool.glob("*.kvt")) for spool in spools] == [[], []], "what is recorded is removed"


def test_what_is_too_much_to_say_is_counted_and_where_all_of_it_is_can_be_pasted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, spool = tmp_path / "a run.duckdb", tmp_path / "spool"
    spool.mkdir()
    for number in range(30):
        (spool / f"{number}.kvt").touch()

    assert cli.main(["record", "-o", str(store), "--spool", str(spool), "--once"]) == 0
    said = capfd.readouterr().err.splitlines()
    assert sum("not a spool file" in line for line in said) == 21
    assert "kvtrace: and 10 more messages like those: empty, not a spool file; skipped" in said
    (asking,) = (line.removeprefix("kvtrace: all of them: ") for line in said if "all of them" in line)
    assert cli.main(shlex.split(asking)[1:]) == 0
    assert capfd.readouterr().out.count("empty, not a spool file") == 30


def test_a_recording_that_is_stopped_while_its_store_is_opened_ends_in_order(tmp_path: Path) -> None:
    """The signal comes as soon as handlers are there, long before DuckDB is loaded."""
    store, spool = tmp_path / "run.duckdb", tmp_path / "spool"
    early = f"""
import os, signal, sys
from kvtrace.cli import main, record
writable = record._writable
def stopped(output):
    os.kill(os.getpid(), signal.SIGTERM)
    return writable(output)
record._writable = stopped
sys.exit(main(["record", "-o", {str(store)!r}, "--spool", {str(spool)!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, check=False, timeout=LONG_S)

    assert ended.returncode == 0, ended.stderr
    assert f"wrote {store}: 0 requests, 0 events, 0 processes" in ended.stderr
    assert [path.name for path in tmp_path.glob("run.duckdb*")] == ["run.duckdb"]


def test_a_killed_recorder_is_completed_from_its_spool_without_loss_or_duplicates(
    tmp_path: Path, emitter: list[str]
) -> None:
    store, go = tmp_path / "run.duckdb", tmp_path / "go"
    process = start("-o", store, "--", *emitter, "25", "0.05", "0", go)
    assert process.stdout is not None
    assert process.stderr is not None
    resume = process.stderr.readline().split("`")[1].split()
    assert resume[:2] == ["kvtrace", "record"]
    for _ in range(15):
        process.stdout.readline()
    process.kill()
    go.touch()
    rest = process.stdout.readlines()  # the command lives on, and its output with it
    assert rest[-1] == "24\n"
    ended = run(*resume[2:], "--once")
    assert ended.returncode == 0, ended.stderr
    assert events(store) == 75
    assert not Path(resume[-1]).exists(), "nobody needs the folder any more"


def test_the_spool_of_what_still_runs_is_kept_and_named(tmp_path: Path, emitter: list[str]) -> None:
    store = tmp_path / "run.duckdb"
    output, go = tmp_path / "output", tmp_path / "go"
    os.mkfifo(output)
    held = os.open(output, os.O_RDWR)  # so that nobody waits for a reader
    command = f"setsid {' '.join(emitter)} 2 0 0 {go} >{output} 2>&1 </dev/null &"
    command += " until ls $KVTRACE_SPOOL/*.kvt; do sleep 0.05; done >/dev/null 2>&1"
    ended = run("-o", store, "--", "bash", "-c", command)
    assert ended.returncode == 0
    folder, rest = kept_of(ended.stderr)
    assert folder.is_dir()
    go.touch()
    with output.open() as told:
        os.close(held)
        assert told.readlines()[-1] == "1\n"  # the pipe has an end once its last writer has
    assert cli.main([*rest, "--once"]) == 0
    assert not folder.exists()


def kept_of(said: str) -> tuple[Path, list[str]]:
    """Return the folder that is kept, and the words that are to be typed for what still comes."""
    (kept,) = [line for line in said.splitlines() if "is kept" in line]
    return Path(kept.split()[1]), shlex.split(kept.split("`")[1])[1:]


def test_the_spool_of_what_has_not_begun_to_write_is_kept_and_its_process_named(
    tmp_path: Path, emitter: list[str]
) -> None:
    """An engine takes half a minute to start; it made the folder anew, and wrote where nobody reads."""
    store, begin, done = (tmp_path / name for name in ("run.duckdb", "begin", "done"))
    late = f"for _ in $(seq 600); do [ -e {begin} ] && break; sleep 0.05; done; "
    late += f"{shlex.join(emitter)} 2 0 0 >{done}.part; mv {done}.part {done}"
    command = f"setsid bash -c {shlex.quote(late)} >/dev/null 2>&1 </dev/null & echo $!"
    ended = run("-o", store, "--", "bash", "-c", command)

    folder, rest = kept_of(ended.stderr)
    assert ended.returncode == 0
    assert f"({ended.stdout.strip()} bash" in ended.stderr
    assert "have it wait for what it starts" in ended.stderr
    begin.touch()
    until(done.exists)
    assert cli.main([*rest, "--once"]) == 0
    assert events(Path(rest[2])) == 6
    assert not folder.exists()


def test_a_signal_while_what_the_command_left_is_waited_for_ends_that_and_the_store_is_told_of(tmp_path: Path) -> None:
    store, told = tmp_path / "run.duckdb", tmp_path / "told"
    left = f"trap 'touch {told}; exit' TERM; echo ready; for _ in $(seq 600); do sleep 0.05; done"
    process = start("-o", store, "--", "bash", "-c", f"bash -c {shlex.quote(left)} & exit 3")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.7)  # the command has ended and was taken note of
    begin_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LONG_S)

    assert process.returncode == 3
    assert told.exists()
    assert time.monotonic() - begin_s < 4.5
    assert f"kvtrace: wrote {store}: 0 requests" in said


def test_shared_memory_is_used_only_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    monkeypatch.setattr(recording, "_SHARED_MEMORY", roomy)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert recording.make_spool().parent == roomy
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=(1 << 30) - 1))
    assert recording.make_spool().parent == tmp_path / "temporary"
