"""What is added to a command line, and how a command runs as a child."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtrace import child, launch
from tests.waiting import LONG_S

FLAG = ("--middleware", launch.MIDDLEWARE)
SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--port", "1")


def prepared(*argv: str, **environment: str) -> launch.Launch:
    return launch.prepare(argv, Path("/spool"), {"PATH": os.environ["PATH"], **environment})


@pytest.mark.parametrize(
    "argv",
    [
        ("vllm", "serve", "model", "--port", "1"),
        ("/opt/bin/vllm", "serve", "model"),
        (sys.executable, *SERVER),
        (sys.executable, "-X", "dev", "-W", "ignore", "-u", *SERVER),
        (sys.executable, "-um", "vllm.entrypoints.openai.api_server"),
        (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "model"),
        (sys.executable, "/opt/bin/vllm", "serve", "model"),
        ("env", "A=B", "D=E", "vllm", "serve", "model"),
        ("env", "-u", "C", "A=B", "vllm", "serve", "model"),
        ("nice", "-n", "5", "vllm", "serve", "model"),
        ("nice", "-5", "vllm", "serve", "model"),
        ("taskset", "-c", "0", sys.executable, *SERVER),
        ("numactl", "-N", "0", "--membind=0", "vllm", "serve", "model"),
        ("timeout", "-k", "5", "30", "vllm", "serve", "model"),
        ("nohup", "nice", "timeout", "30", "taskset", "0x1", sys.executable, *SERVER),
        ("uv", "run", "--python", "3.12", "vllm", "serve", "model"),
    ],
)
def test_a_direct_server_gets_the_flag_behind_its_own_arguments(argv: tuple[str, ...]) -> None:
    made = prepared(*argv)
    assert made.argv == (*argv, *FLAG)
    assert made.notes == ()


@pytest.mark.parametrize(
    "argv",
    [
        ("bash", "-c", "vllm serve model"),
        ("./run.sh",),
        ("vllm", "bench", "serve", "--model", "m"),
        ("vllm",),
        (sys.executable, "-c", "import vllm"),
        (sys.executable, "script.py", "serve"),
        (sys.executable, "-m", "vllm.entrypoints.cli.main", "bench"),
        (sys.executable, "vllm.entrypoints.openai.api_server"),
        (sys.executable,),
        (sys.executable, "-m"),
        ("env",),
        ("timeout",),
        ("uv", "pip", "install", "vllm"),
        ("strace", "-f", "vllm", "serve", "model"),
    ],
)
def test_any_other_command_is_left_alone_and_that_is_said(argv: tuple[str, ...]) -> None:
    made = prepared(*argv)
    assert made.argv == argv
    assert launch.MIDDLEWARE in made.notes[0]


def test_the_flag_is_not_added_twice_and_stays_before_a_bare_double_dash() -> None:
    once = ("vllm", "serve", "model", f"--middleware={launch.MIDDLEWARE}")
    assert prepared(*once).argv == once
    assert prepared("vllm", "serve", "--x", "--", "model").argv == ("vllm", "serve", "--x", *FLAG, "--", "model")


def test_the_environment_gains_the_spool_and_nothing_else() -> None:
    assert prepared("true", A="B").environment == {"PATH": os.environ["PATH"], "A": "B", "KVTRACE_SPOOL": "/spool"}


def test_a_rate_of_checking_reaches_the_command_only_where_one_is_given() -> None:
    kept = launch.prepare(("true",), Path("/spool"), {"PATH": os.environ["PATH"], "KVTRACE_VERIFY_KV": "0.5"})
    given = launch.prepare(("true",), Path("/spool"), {"PATH": os.environ["PATH"]}, verify_kv=0.1)

    assert kept.environment["KVTRACE_VERIFY_KV"] == "0.5"
    assert given.environment["KVTRACE_VERIFY_KV"] == "0.1"


@pytest.mark.parametrize(("allowed", "result"), [("lora", "lora,kvtrace"), ("", "kvtrace"), ("kvtrace,x", "kvtrace,x")])
def test_an_allow_list_of_plugins_gains_this_one(allowed: str, result: str) -> None:
    assert prepared("true", VLLM_PLUGINS=allowed).environment["VLLM_PLUGINS"] == result


def test_an_interpreter_without_kvtrace_is_left_alone(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    made = prepared(str(bare), *SERVER)
    assert made.argv == (str(bare), *SERVER)
    assert str(bare) in made.notes[0]
    script = tmp_path / "vllm"
    script.write_text(f"#!{bare}\n")
    script.chmod(0o755)
    assert prepared(str(script), "serve", "model").argv == (str(script), "serve", "model")


# The child -------------------------------------------------------------------------------------------

RUN = "import os, sys; from kvtrace import child; sys.exit(child.run(sys.argv[1:], dict(os.environ)))"
# Reports every signal and ends at the end of its input.
REPORTER = """
import os, signal, sys
def report(number, frame):
    os.write(1, f"<{signal.Signals(number).name}>".encode())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, report)
os.write(1, b"<ready>")
while os.read(0, 1):
    pass
os.write(1, b"<end>")
sys.exit(7)
"""


def runner(*argv: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, *argv], stdout=subprocess.PIPE, **more)


def read_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    assert process.stdout is not None
    seen = b""
    while text not in seen:
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, f"ended after {seen!r}"
        seen += piece
    return seen


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["sh", "-c", "exit 0"], 0, b""),
        (["sh", "-c", "exit 7"], 7, b""),
        (["sh", "-c", "kill -KILL $$"], 137, b""),
        (["sh", "-c", "kill -SEGV $$"], 139, b""),
        (["no-such-program"], 127, b"kvtrace: command not found: no-such-program\n"),
        (["/etc/passwd"], 126, b"kvtrace: cannot execute /etc/passwd: Permission denied\n"),
    ],
)
def test_exit_code_is_the_commands_own(argv: list[str], code: int, line: bytes) -> None:
    ended = subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, line)


def test_a_script_that_names_no_interpreter_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "start"
    script.write_text("echo up\n")
    script.chmod(0o755)

    ended = subprocess.run([sys.executable, "-c", RUN, script], capture_output=True, check=False)

    assert ended.returncode == 126
    assert b"Exec format error; a script needs a first line like #!/bin/sh" in ended.stderr


def test_input_output_and_errors_pass_through() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RUN, "sh", "-c", "cat; echo wrong >&2"], input=b"hello", capture_output=True, check=False
    )
    assert (ended.stdout, ended.stderr) == (b"hello", b"wrong\n")


def test_a_child_that_writes_into_a_closed_pipe_dies_of_it_as_it_would_alone() -> None:
    command = f"{sys.executable} -c '{RUN}' yes; echo $? >&2"
    ended = subprocess.run(["bash", "-c", f"({command}) | head -1"], capture_output=True, check=False)
    assert ended.stderr.split()[-1] == b"141"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_handed_on_once(number: signal.Signals) -> None:
    process = runner(sys.executable, "-c", REPORTER, stdin=subprocess.PIPE)
    read_until(process, b"<ready>")
    process.send_signal(number)
    seen = read_until(process, f"<{number.name}>".encode())
    time.sleep(0.2)  # in which a second one would come
    assert seen + process.communicate()[0] == f"<{number.name}><end>".encode()
    assert process.returncode == 7


def test_a_child_that_dies_of_the_signal_gives_128_and_its_number() -> None:
    process = runner("sh", "-c", "echo ready; exec sleep 30")
    read_until(process, b"ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 143


def test_interrupts_that_are_repeated_escalate() -> None:
    process = runner(sys.executable, "-c", REPORTER, stdin=subprocess.PIPE)
    read_until(process, b"<ready>")
    process.send_signal(signal.SIGINT)
    read_until(process, b"<SIGINT>")
    process.send_signal(signal.SIGINT)
    read_until(process, b"<SIGTERM>")
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG_S) == 137


def test_sigterm_ends_what_a_shell_leaves_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = runner("bash", "-c", f"sleep 60 & echo $! > {pid_file}; echo ready; wait")
    read_until(process, b"ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 143
    assert not is_running(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_was_ignored_stays_ignored_in_the_child_and_is_handed_on_all_the_same() -> None:
    show = "import signal as s, time; print(s.getsignal(s.SIGHUP) == s.SIG_IGN, flush=True); time.sleep(0.5)"
    process = runner(sys.executable, "-c", show, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    read_until(process, b"True")
    process.send_signal(signal.SIGHUP)
    assert process.wait(LONG_S) == 0


def test_end_waits_a_moment_for_what_is_left_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it runs, and not for the whole time that it may take."""
    monkeypatch.setattr(child, "_SETTLE_S", 2 * LONG_S)
    marker = tmp_path / "written"
    began_s = time.monotonic()
    assert child.run(["sh", "-c", f"(sleep 0.4; touch {marker}) & exit 3"], dict(os.environ)) == 3
    assert marker.exists()
    assert time.monotonic() - began_s < LONG_S


class Terminal:
    """A pseudo-terminal with the runner in its foreground, as a shell would start it."""

    def __init__(self, *argv: str) -> None:
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", RUN, *argv])  # noqa: S606

    def read_until(self, text: bytes, timeout_s: float = LONG_S) -> bytes:
        seen = b""
        deadline_s = time.monotonic() + timeout_s
        while text not in seen:
            ready, _, _ = select.select([self.end], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, f"only {seen!r}"
            try:
                seen += os.read(self.end, 4096)
            except OSError:
                raise AssertionError(f"ended after {seen!r}") from None
        return seen

    def type(self, text: bytes) -> None:
        os.write(self.end, text)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_in_a_terminal_reaches_the_child_once_and_the_runner_lives_on() -> None:
    terminal = Terminal(sys.executable, "-c", REPORTER)
    terminal.read_until(b"<ready>")
    terminal.type(b"\x03")
    seen = terminal.read_until(b"<SIGINT>")
    time.sleep(0.2)  # in which a second one would come
    terminal.type(b"\x04")
    assert (seen + terminal.read_until(b"<end>")).count(b"<SIGINT>") == 1
    assert terminal.wait() == 7


def test_a_child_can_read_from_the_terminal() -> None:
    terminal = Terminal(sys.executable, "-c", "print('name?', flush=True); print('hello ' + input(), flush=True)")
    terminal.read_until(b"name?")
    terminal.type(b"world\n")
    terminal.read_until(b"hello world")
    assert terminal.wait() == 0


# One process, in the foreground and asleep: a shell caught between two of its own steps can lose the stop.
SLEEPER = """
import os, sys, time
while os.tcgetpgrp(0) != os.getpgrp():
    time.sleep(0.02)
print("be" + "gun", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("en" + "ded", flush=True)
"""


def test_ctrl_z_stops_both_and_the_shell_can_go_on_with_them(tmp_path: Path) -> None:
    script, may_end = tmp_path / "sleeper.py", tmp_path / "may-go-on"
    script.write_text(SLEEPER)
    shell, end = pty.fork()
    if shell == 0:
        os.environ["PS1"] = "$ "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])  # noqa: S606
    terminal = Terminal.__new__(Terminal)
    terminal.pid, terminal.end = shell, end
    command = f"{sys.executable} -c '{RUN}' {sys.executable} {script} {may_end}\n"
    terminal.type(command.encode())
    terminal.read_until(b"begun\r")
    terminal.type(b"\x1a")
    terminal.read_until(b"Stopped")
    may_end.touch()
    time.sleep(0.2)  # in which one that is not stopped would end
    terminal.type(b"fg\n")
    seen = terminal.read_until(b"ended\r")
    assert seen.index(b"fg\r") < seen.index(b"ended\r")
    terminal.type(b"echo again $?\n")
    terminal.read_until(b"again 0")
    terminal.type(b"exit\n")
    assert terminal.wait() == 0
