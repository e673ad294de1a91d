"""`kvtrace record` as a user runs it: real commands, real emitters, real signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtrace import child, cli
from kvtrace.cli import recording
from kvtrace.store import Store
from tests import exported
from tests.trace import push
from tests.waiting import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

# Emits a router's three points for N requests, SECONDS apart, and ends with CODE; the last once the file GO is there.
EMITTER = """
import os, sys, time
from kvtrace import emit, stages
count, pause_s, code = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
tracer = emit.tracer()
for number in range(count):
    while number == count - 1 and sys.argv[4:] and not os.path.exists(sys.argv[4]):
        time.sleep(0.02)
    for stage in (stages.ROUTER_RECEIVED, stages.ROUTER_FIRST_TOKEN, stages.ROUTER_DONE):
        tracer.emit(stage.code, f"kvt-{number:032x}", 200)
    print(number, flush=True)
    time.sleep(pause_s)
sys.exit(code)
"""


@pytest.fixture
def emitter(tmp_path: Path) -> list[str]:
    script = tmp_path / "emitter.py"
    script.write_text(EMITTER)
    return [sys.executable, str(script)]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep private spool folders inside the test's own folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    monkeypatch.setattr("tempfile.tempdir", None)


def program(*arguments: str | Path) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import sys; from kvtrace.cli import main; sys.exit(main())",
        "record",
        *map(str, arguments),
    ]


def run(*arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(program(*arguments), capture_output=True, text=True, check=False, timeout=LONG_S, **more)


def start(*arguments: str | Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(program(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def answer(path: Path, sql: str) -> Any:
    with Store.open(path, "read") as store:
        return next(iter(store.rows(sql)[0].values()))


def events(path: Path) -> int:
    return int(answer(path, "SELECT count(*) FROM event WHERE stage::VARCHAR LIKE 'router.%'"))


def spool_of(said: str) -> Path:
    """Return the folder that a recorder follows, from what it says at its start; others record at the same time."""
    return Path(said.split("`")[1].rsplit(" --spool ")[1])


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
        (["--once", "--spool", "/no/such/folder"], "/no/such/folder"),
        (["--spool", "/etc/passwd"], "not a folder"),
        (["--lab", "push", "--requests", "0"], "at least 1"),
        (["--requests", "many"], "valid integer"),
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


def test_a_command_is_recorded_where_the_labs_parts_are_missing(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['kvtrace.lab'] = None; from kvtrace.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", blocked, "record", "-o", str(tmp_path / "run.duckdb"), "--", "true"], check=False
    )
    assert ended.returncode == 0


def test_a_rate_of_checking_needs_engines_to_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "x"), "--spool", str(tmp_path), "--verify-kv", "0.1"]) == 2
    assert "set KVTRACE_VERIFY_KV where engines start" in capfd.readouterr().err
