"""Arming the hooks of a running lab's engines to raise, and what their logs and spools say of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtrace import stages
from kvtrace.lab import workload
from kvtrace.lab.stack import Lab
from tests import spooled
from tests.engine import sites
from tests.engine.deployment import SMALL_CACHE

SITES = sites.paths("raise_site", "start_site")
EACH = "each"
"""Every hook raises when it is first called in a process."""
OFF = re.compile(r"kvtrace switched itself off in process (\d+)")
UNUSABLE = re.compile(r"kvtrace is off in process (\d+): cannot write to")
NO_ROOM = re.compile(r"kvtrace drops and counts events in process (\d+) until there is room")
ROOM_AGAIN = re.compile(r"kvtrace records again in process (\d+)")
ENGINES = ("prefill", "decode")
BUDGET_BYTES = 32 << 20
"""Of each emitter: a process has as many of them as there are hooks."""


class Switch:
    """The folder through which engines are told which hook raises."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generation = 0
        for name in ("hooks", "raised"):
            (folder / name).mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that put the patches into a process."""
        return {"PYTHONPATH": SITES, "KVTRACE_RAISE": str(self._folder)}

    def arm(self, name: str) -> None:
        """Let the hook of this name raise from now on, after each process has begun tracing anew."""
        self._generation += 1
        draft = self._folder / "draft"
        draft.write_text(f"{self._generation} {name}")
        draft.rename(self._folder / "armed")

    def hooks(self) -> set[str]:
        """Return the names of all hooks that are watched."""
        return {path.name for path in (self._folder / "hooks").iterdir()}

    def raised(self) -> dict[str, set[int]]:
        """Return the ids of the processes in which a hook has raised, by its name."""
        found: dict[str, set[int]] = {}
        for path in (self._folder / "raised").iterdir():
            name, _, pid = path.name.rpartition(" ")
            found.setdefault(name, set()).add(int(pid))
        return found

    def forget(self) -> None:
        """Forget what has raised so far."""
        for path in (self._folder / "raised").iterdir():
            path.unlink()


class Bench:
    """A lab whose engines' hooks can be armed, and whose spool folder is a link that can be pointed elsewhere."""

    def __init__(self, mode: str, folder: Path, armed: str, **environment: dict[str, str]) -> None:
        self.switch = Switch(folder / "raise")
        self.switch.arm(armed)
        self._folder = folder
        self.link = folder / "spool"
        self.point_to(self.new_folder("first"))
        common = self.switch.environment | {"KVTRACE_SPOOL_BUDGET": str(BUDGET_BYTES)}
        extra = {role: common | environment.get(role, {}) for role in ENGINES}
        self.lab = Lab(mode, spool=self.link, environment=extra, quiet=True, arguments=SMALL_CACHE)
        self._read: dict[Path, int] = {}

    def new_folder(self, name: str) -> Path:
        """Return a new empty folder."""
        folder = self._folder / name
        folder.mkdir()
        return folder

    def point_to(self, folder: Path) -> None:
        """Make another folder the spool of every emitter that begins from now on."""
        draft = self._folder / "draft"
        draft.symlink_to(folder)
        draft.rename(self.link)

    def ask(self, url: str | None = None, requests: int = 2, seed: int = 1, rate_qps: float = 1000.0) -> list[Any]:
        """Return the status and the token ids that each request is answered with."""
        load = workload.run(
            url or self.lab.url,
            quiet=True,
            requests=requests,
            rate_qps=rate_qps,
            concurrency=None if rate_qps == float("inf") else 1,
            input_len=100,
            output_len=4,
            seed=seed,
        )
        return [(record.status, record.token_ids, record.error) for record in load.records]

    def said(self) -> str:
        """Return what the engines' logs say since the last call."""
        text = ""
        for engine in self.lab.engines:
            content = engine.log.read_text(errors="replace")
            text += content[self._read.get(engine.log, 0) :]
            self._read[engine.log] = len(content)
        return text

    def disabled(self) -> list[str]:
        """Return why processes switched tracing off, as the spool has it."""
        return [record.ref for record in spooled.read(self.link).of(stages.DISABLED.code)]

    @contextmanager
    def fresh(self, armed: str) -> Iterator[None]:
        """Arm a hook for the block, and remove the spool files that processes have left since."""
        before = list(self.link.glob("*.kvt"))
        self.said()
        self.switch.forget()
        self.switch.arm(armed)
        yield
        for path in before:
            path.unlink(missing_ok=True)


def pids(pattern: re.Pattern[str], text: str) -> list[int]:
    """Return the process ids of all lines of a kind."""
    return sorted(int(pid) for pid in pattern.findall(text))


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory for the block; skip the test where that is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remove(folder: Path) -> None:
    """Remove a folder that others write to, within 10 s."""
    deadline_s = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < deadline_s, f"{folder} cannot be removed"
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)
