"""The frame of the program: what is loaded when, what goes where, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Annotated

import pytest
import typer

from kvtrace import __version__, cli
from kvtrace.errors import KvtraceError, StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

HEAVY = ("rich", "duckdb", "pyarrow", "numpy", "httpx", "starlette", "uvicorn", "opentelemetry")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Return a function that makes `function` the command `record`."""

    def put(function: Callable[..., object]) -> None:
        module = types.ModuleType("kvtrace_test_command")
        module.command = function
        monkeypatch.setitem(sys.modules, "kvtrace_test_command", module)
        settings = cli.COMMANDS["record"].context_settings
        monkeypatch.setitem(cli.COMMANDS, "record", cli.Command("kvtrace_test_command", "A test.", settings))

    return put


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        """Raise."""
        raise error

    return command


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from kvtrace.cli import main; code = main(['--help']);"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "HEAVY [] 0" in done.stdout
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.sentence.split()[0] in done.stdout


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0

    told = capsys.readouterr().out
    assert told.startswith(f"Usage: kvtrace {name} ")
    assert len(told.split("\n\n")[1].strip()) > 20
    assert cli.COMMANDS[name].sentence.endswith(".")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtrace {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(KvtraceError("it broke"), 1), (StoreError("it broke"), 1), (UsageError("it broke"), 2)],
)
def test_an_error_of_ours_is_one_line_and_its_exit_code(
    error: BaseException,
    code: int,
    install: Callable[[Callable[..., object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(raising(error))

    assert cli.main(["record"]) == code

    streams = capsys.readouterr()
    assert streams.err == "kvtrace: error: it broke\n"
    assert streams.out == ""


def test_an_error_line_cannot_move_the_cursor_or_span_lines(
    install: Callable[[Callable[..., object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(raising(KvtraceError("no \x1b[2J\x07request\r\nnamed \u202eabc")))

    assert cli.main(["record"]) == 1
    assert capsys.readouterr().err == "kvtrace: error: no \\x1b[2J\\x07request named \\u202eabc\n"


def test_an_unforeseen_error_is_one_line_that_names_it(
    install: Callable[[Callable[..., object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVTRACE_DEBUG", raising=False)
    install(raising(ZeroDivisionError("by zero")))

    assert cli.main(["record"]) == 1
    assert capsys.readouterr().err == (
        "kvtrace: error: unexpected ZeroDivisionError: by zero (KVTRACE_DEBUG=1 shows the traceback)\n"
    )


def test_debug_shows_the_traceback(
    install: Callable[[Callable[..., object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVTRACE_DEBUG", "1")
    install(raising(ZeroDivisionError("by zero")))

    assert cli.main(["record"]) == 1

    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told
    assert "in command" in told


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Query interrupted")], ids=["python", "duckdb"])
def test_an_interrupt_ends_with_130_and_says_nothing(
    install: Callable[[Callable[..., object]], None], capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    """Whoever hears of it first: DuckDB makes an error of its own of it while it works on a query."""
    install(raising(error))

    assert cli.main(["record"]) == 130
    assert capsys.readouterr().err == ""


def test_a_command_passes_on_its_childs_exit_code(install: Callable[[Callable[..., object]], None]) -> None:
    def command() -> int:
        """Return what the child returned."""
        return 7

    install(command)

    assert cli.main(["record"]) == 7


@pytest.mark.parametrize(
    ("arguments", "child"),
    [
        (["-o", "a", "--", "sh", "-c", "exit 3", "--", "-o", "b"], ["sh", "-c", "exit 3", "--", "-o", "b"]),
        (["-o", "a", "vllm", "serve", "-o", "b", "--help"], ["vllm", "serve", "-o", "b", "--help"]),
        (["-o", "a", "--", "--odd"], ["--odd"]),
    ],
)
def test_the_users_own_command_reaches_record_untouched(
    arguments: list[str], child: list[str], install: Callable[[Callable[..., object]], None]
) -> None:
    seen = {}

    def command(words: Annotated[list[str], typer.Argument()], output: Annotated[str, typer.Option("-o")] = "") -> None:
        """Remember."""
        seen.update(words=words, output=output)

    # The annotations above name locals of this test, so they are handed over as objects.
    command.__annotations__ = {
        "words": Annotated[list[str], typer.Argument()],
        "output": Annotated[str, typer.Option("-o")],
        "return": None,
    }
    install(command)

    assert cli.main(["record", *arguments]) == 0
    assert seen == {"words": child, "output": "a"}


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["explain"], ["--nonsense"], ["explain", "x", "--slowest", "none"]]
)
def test_a_wrong_command_line_is_one_line_and_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2

    told = capsys.readouterr().err
    assert told.startswith("kvtrace: error: ")
    assert told.count("\n") == 1
    assert "--help`" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "x", "--format", "csv"], "--format: 'csv' is not one of 'perfetto', 'otlp-json', "),
        (["lab", "shove"], "mode: 'shove' is not one of 'push', 'pull'"),
        (["explain", "x", "--slowest", "two"], "--slowest wants a whole number, not 'two'"),
        (["explain", "x", "--slowest", "0"], "--slowest is at least 1, not 0"),
        (["router", "--port", "70000"], "--port is at most 65535, not 70000"),
        (["record", "--rate", "fast"], "--rate wants a number, not 'fast'"),
    ],
)
def test_what_a_value_may_be_is_said_in_our_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever parses arguments, and whatever checks them, has words of its own for it."""
    assert cli.main(arguments) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"kvtrace: error: {said}")
    assert not re.search("Value error|Input should|Invalid value", told)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_a_reader_that_goes_away_leaves_no_complaint() -> None:
    """`kvtrace ... | head` ends quietly though nobody reads the rest."""
    program = (
        "import sys, types, typer; from kvtrace import cli\n"
        "def command() -> None:\n"
        "    'Say a lot.'\n"
        "    for _ in range(100_000): typer.echo('line')\n"
        "module = types.ModuleType('loud'); module.command = command; sys.modules['loud'] = module\n"
        "cli.COMMANDS['record'] = cli.Command('loud', 'A test.')\n"
        "sys.exit(cli.main(['record']))\n"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)

    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


def test_the_module_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "kvtrace", "--version"], capture_output=True, text=True, check=True)

    assert done.stdout == f"kvtrace {__version__}\n"
