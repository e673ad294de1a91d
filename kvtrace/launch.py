"""A command made ready to run with instrumentation switched on: what is added to it, and what is not.

The environment carries the switch (`KVTRACE_SPOOL`), so every vLLM process below the command finds it.
Only the HTTP points need a flag, and only a command line that starts vLLM's API server directly, or behind
one of the wrappers listed here, gets it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.emit import SPOOL_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIDDLEWARE = "instrumented_connectors.middleware.TraceMiddleware"
PLUGIN = "kvtrace"
VERIFY_VARIABLE = "KVTRACE_VERIFY_KV"
"""Which part of the requests (0 to 1) has its handed-over blocks checked, as engine processes read it."""
_SERVER_MODULES = {"vllm.entrypoints.openai.api_server": (), "vllm.entrypoints.cli.main": ("serve",)}
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_PYTHON_MODULE = re.compile(r"-[bBdEiIOPqsSuvx]*m")
_FIND_SPEC = "import importlib.util, sys; sys.exit(importlib.util.find_spec('instrumented_connectors') is None)"


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A program that runs another: its options that take a value, the words before it, the arguments before it."""

    valued: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    positionals: int = 0
    assignments: bool = False


def _wrapper(
    valued: str = "", words: tuple[str, ...] = (), positionals: int = 0, *, assignments: bool = False
) -> _Wrapper:
    return _Wrapper(frozenset(valued.split()), words, positionals, assignments)


_WRAPPERS = {
    "env": _wrapper("-u --unset -C --chdir", assignments=True),
    "nice": _wrapper("-n --adjustment"),
    "ionice": _wrapper("-c -n --class --classdata"),
    "nohup": _wrapper(),
    "numactl": _wrapper("-N -m -C -i -p -P -w --cpunodebind --membind --physcpubind --interleave --preferred"),
    "setsid": _wrapper(),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "taskset": _wrapper(positionals=1),
    "time": _wrapper("-f -o --format --output"),
    "timeout": _wrapper("-k -s --kill-after --signal", positionals=1),
    "uv": _wrapper("--with --python -p --project --directory --extra --group --env-file", words=("run",)),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A command ready to run: its arguments, its environment, and what the user should know about both."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()


def prepare(argv: Sequence[str], spool: Path, environment: Mapping[str, str], verify_kv: float = 0.0) -> Launch:
    """Return the command with instrumentation switched on, its events going to the folder `spool`.

    Of `verify_kv` (0 to 1) of the requests the handed-over blocks are checked; 0 leaves the environment's own word.
    """
    prepared = {**environment, SPOOL_VARIABLE: str(spool.absolute())}
    if verify_kv:
        prepared[VERIFY_VARIABLE] = str(verify_kv)
    notes: list[str] = []
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        prepared["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}".strip(",")
        notes.append(f"VLLM_PLUGINS does not name {PLUGIN}: added it for this command")
    begin = _server_arguments(argv)
    if begin is None:
        notes.append(
            "this command line does not start vLLM's API server directly: its engines are recorded, HTTP times only "
            f"of servers that are given `--middleware {MIDDLEWARE}`"
        )
        return Launch(tuple(argv), prepared, tuple(notes))
    interpreter = _interpreter(argv, begin)
    if interpreter is not None and not _is_installed_for(interpreter, prepared):
        notes.append(
            f"kvtrace is not installed for {interpreter}: nothing below this command is recorded; install kvtrace there"
        )
        return Launch(tuple(argv), prepared, tuple(notes))
    return Launch(_with_middleware(argv, begin), prepared, tuple(notes))


# The command line ---------------------------------------------------------------------------------------


def _with_middleware(argv: Sequence[str], begin: int) -> tuple[str, ...]:
    """Return the command line with the middleware flag behind the server's own arguments, once."""
    own = argv[begin:]
    if any(MIDDLEWARE in argument for argument in own):
        return tuple(argv)
    end = begin + (own.index("--") if "--" in own else len(own))
    return (*argv[:end], "--middleware", MIDDLEWARE, *argv[end:])


def _server_arguments(argv: Sequence[str]) -> int | None:
    """Return the index of the API server's first own argument, None where no server is started directly."""
    at = _program(argv)
    if at is None:
        return None
    rest = (_after_python(argv, at + 1) if _PYTHON.fullmatch(Path(argv[at]).name) else None) or at
    words: tuple[str, ...] | None = ("serve",) if Path(argv[rest]).name == "vllm" else None
    if rest != at and argv[rest] in _SERVER_MODULES and _PYTHON_MODULE.fullmatch(argv[rest - 1]):
        words = _SERVER_MODULES[argv[rest]]
    if words is None:
        return None
    begin = rest + 1 + len(words)
    return begin if tuple(argv[rest + 1 : begin]) == words else None


def _program(argv: Sequence[str]) -> int | None:
    """Return the index of the program behind the known wrappers, None where there is none."""
    at = 0
    while at < len(argv):
        wrapper = _WRAPPERS.get(Path(argv[at]).name)
        if wrapper is None:
            return at
        behind = _behind(argv, at + 1, wrapper)
        if behind is None:
            return None
        at = behind
    return None


def _behind(argv: Sequence[str], at: int, wrapper: _Wrapper) -> int | None:
    """Return the index behind a wrapper's own arguments, None where they have another shape."""
    if tuple(argv[at : at + len(wrapper.words)]) != wrapper.words:
        return None
    at += len(wrapper.words)
    while at < len(argv) and argv[at].startswith("-"):
        option = argv[at]
        at += 2 if option in wrapper.valued else 1
        if option == "--":
            break
    at += wrapper.positionals
    while wrapper.assignments and at < len(argv) and "=" in argv[at]:
        at += 1
    return at


def _after_python(argv: Sequence[str], at: int) -> int | None:
    """Return the index of the module or script that an interpreter runs, None where it runs neither."""
    while at < len(argv) and argv[at].startswith("-"):
        option = argv[at]
        if _PYTHON_MODULE.fullmatch(option):
            return at + 1 if at + 1 < len(argv) else None
        if option in {"-", "-c"}:
            return None
        at += 2 if option in {"-X", "-W"} else 1
    return at if at < len(argv) else None


# The interpreter ----------------------------------------------------------------------------------------


def _interpreter(argv: Sequence[str], begin: int) -> str | None:
    """Return the path of the interpreter that will run the server, None where it cannot be told."""
    for argument in argv[:begin]:
        name = Path(argument).name
        if _PYTHON.fullmatch(name):
            return shutil.which(argument)
        if name == "vllm":
            return _shebang(shutil.which(argument))
    return None


def _shebang(script: str | None) -> str | None:
    """Return the interpreter that a script's first line names by its path, None for anything else."""
    if script is None:
        return None
    with suppress(OSError), Path(script).open("rb") as file:
        first = file.readline(512)
        path = first[2:].decode(errors="replace").strip()
        if first.startswith(b"#!") and _PYTHON.fullmatch(Path(path).name):
            return path
    return None


def _is_installed_for(interpreter: str, environment: Mapping[str, str]) -> bool:
    """Return False where the interpreter says that it cannot import the instrumented connectors."""
    if Path(interpreter).absolute() == Path(sys.executable).absolute():
        return True
    with suppress(OSError, subprocess.TimeoutExpired):
        probe = subprocess.run(  # noqa: S603  the user's own command names this interpreter
            [interpreter, "-c", _FIND_SPEC],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
        return probe.returncode != 1 or bool(probe.stderr)
    return True
