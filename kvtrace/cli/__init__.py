"""`kvtrace`: parse, dispatch, map errors to exit codes.

Commands write data to stdout and what they have to say of it to stderr, by `kvtrace.messages`. Each command
lives in a module of its own, exposes a function `command`, and is imported only when it is asked for, so
that `kvtrace --help` and shell completion answer at once.
"""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvtrace import __version__, messages
from kvtrace.errors import KvtraceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEBUG_VARIABLE = "KVTRACE_DEBUG"
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
"""As a shell has it for a program that a closed pipe ended."""
_INTERRUPTED_QUERY = "Query interrupted"
_LAST_STANDARD_DESCRIPTOR = 2
_WANTED = {"int": "a whole number", "float": "a number", "finite": "a number"}
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program: its module, its sentence in `--help`, how its arguments are parsed."""

    module: str
    sentence: str
    context_settings: dict[str, Any] = field(default_factory=dict)


COMMANDS: dict[str, Command] = {
    "record": Command(
        "kvtrace.cli.record",
        "Record what engines and routers emit into a store anybody can open.",
        # Whatever follows the first word of the user's own command belongs to that command.
        {"allow_interspersed_args": False},
    ),
    "explain": Command("kvtrace.cli.explain", "Explain where the time to first token went."),
    "import": Command(
        "kvtrace.cli.import_", "Import records of load generators, routers and connector logs into a store."
    ),
    "export": Command(
        "kvtrace.cli.export", "Export requests to Perfetto, OpenTelemetry or Parquet, profiles to pprof."
    ),
    "sql": Command("kvtrace.cli.sql", "Ask a store a question in SQL, by a query's name or in full."),
    "dashboards": Command("kvtrace.cli.dashboards", "Write Grafana's dashboards, alert rules and provisioning files."),
    "router": Command("kvtrace.cli.router", "Route requests to prefill and decode engines, by push or by pull."),
    "lab": Command("kvtrace.cli.lab", "Start prefill engines, decode engines and a router on this machine."),
    "upgrade": Command("kvtrace.cli.upgrade", "Bring a store of an older kvtrace to the present schema."),
    "doctor": Command("kvtrace.cli.doctor", "Check what kvtrace needs on this machine."),
}


@functools.cache
def _built(name: str, function: Callable[..., object]) -> Any:
    """Return a function as the click object of that command; a process that asks again gets the same one."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, context_settings=COMMANDS[name].context_settings)(function)
    return typer.main.get_command(single)


class LazyCommands(TyperGroup):
    """The group of all commands, each imported when it is named and not before."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all commands, in the order of `--help`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return the command of that name as a click object, or None."""
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else _built(cmd_name, importlib.import_module(entry.module).command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.sentence) for name, entry in COMMANDS.items()])


app = typer.Typer(
    name="kvtrace",
    cls=LazyCommands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tell where the time to first token goes when prefill and decode run on separate vLLM engines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program on `arguments` (default: the process's own) and return its exit code."""
    _stand_in_for_closed_streams()
    try:
        outcome = app(args=arguments, prog_name="kvtrace", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _unread()
    except SystemExit as ended:
        # That is what typer makes of it, with exit code 1.
        if isinstance(ended.__context__, BrokenPipeError):
            return _unread()
        raise
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.Abort:
        return EXIT_FAILURE
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except KvtraceError as error:
        return _complain(str(error), EXIT_FAILURE)
    except OSError as error:
        # What is written to a file by name is the business of whoever names it; stdout has none.
        return _unwritten(error) if error.errno in _FULL and error.filename is None else _unexpected(error)
    except Exception as error:  # noqa: BLE001 -- the last stop: the user gets a line, not a traceback
        # DuckDB takes SIGINT over while it works on a query, and then says so in an error of its own.
        return EXIT_INTERRUPTED if str(error) == _INTERRUPTED_QUERY else _unexpected(error)
    return outcome if isinstance(outcome, int) else 0


def _stand_in_for_closed_streams() -> None:
    """Put /dev/null in the place of standard streams that the caller closed, so that no store gets their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_DESCRIPTOR:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 -- open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter shows its number


def _unread() -> int:
    """End quietly, since the reader (head, less) has what it wants."""
    _drop_output()
    return EXIT_PIPE_CLOSED


def _unwritten(error: OSError) -> int:
    """Report an output that does not fit where it goes."""
    _drop_output()
    return _complain(f"the output cannot be written: {error.strerror}; make room, or send it elsewhere", EXIT_FAILURE)


def _drop_output() -> None:
    """Send what stdout still holds nowhere, so that the interpreter's own flush at the end does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: Exception) -> int:
    """Report a wrong command line (exit code 2) or an error that nobody foresaw (exit code 1)."""
    describe = getattr(error, "format_message", None)
    if describe is not None:
        return _complain_of_usage(error, _refused(error) or describe())
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _complain(f"unexpected {what} ({DEBUG_VARIABLE}=1 shows the traceback)", EXIT_FAILURE)


def _refused(error: Exception) -> str:
    """Return which value cannot be and what would be one, in place of pydantic's words; "" for any other error."""
    details = getattr(error.__cause__, "errors", None)
    parameter = getattr(error, "param", None)
    if details is None or parameter is None:
        return ""
    first = details()[0]
    name = max(parameter.opts, key=len)
    value, kind, bounds = first["input"], first["type"], first.get("ctx", {})
    for ending, least_or_most in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if ending in bounds:
            return f"{name} is {least_or_most} {bounds[ending]}, not {value}"
    wanted = next((words for begin, words in _WANTED.items() if kind.startswith(begin)), None)
    if wanted is not None:
        return f"{name} wants {wanted}, not {value!r}"
    return f"{name}: {str(bounds.get('error', first['msg'])).rstrip('.')}"


def _complain_of_usage(error: Exception, message: str) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        messages.write(message.rstrip() + "\n")
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    program = context.command_path if context is not None else "kvtrace"
    return _complain(f"{message.rstrip('.')}; see `{program} --help`", EXIT_USAGE)


def _complain(message: str, code: int) -> int:
    """Say what is wrong and return `code`."""
    messages.say(f"error: {message}")
    return code
