"""One server of the lab: a command, what is added to its environment, its log, its process."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrace.emit import SPOOL_VARIABLE
from kvtrace.errors import LabError
from kvtrace.lab import ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# An engine start imports thousands of modules; never to keep their byte code makes every start a first one.
_DROPPED = ("PYTHONDONTWRITEBYTECODE", SPOOL_VARIABLE)


@dataclass(slots=True)
class Program:
    """A server that runs in a process group of its own, so that all its descendants can be found."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that the program gets on top of the lab's own."""
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """Return the process id of the running server."""
        if self.process is None:
            raise LabError(f"{self.name} has not been started")
        return self.process.pid

    @property
    def shell_line(self) -> str:
        """Return the command as it can be pasted into a shell, environment and all."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join((*settings, shlex.join(self.command)))

    def start(self, marks: Mapping[str, str]) -> None:
        """Start the server, its output going to the log; `marks` are variables that only tell whose it is."""
        inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        environment = {**inherited, **self.environment, **marks}
        paths = (self.environment.get("PYTHONPATH"), inherited.get("PYTHONPATH"))
        if any(paths):
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 -- the command is the lab's own
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group, not a session: the kernel shares processors out by session first, and two sessions whose
                # threads spin (NIXL's progress thread, vLLM's queues) were seen to starve each other for seconds.
                process_group=0,
            )

    def exit_code(self) -> int | None:
        """Return the exit code of an ended server (-n for signal n), None while it runs."""
        return None if self.process is None else self.process.poll()

    def last_lines(self, count: int = 40) -> str:
        """Return the end of the log."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, maxlen=count)).rstrip()
        except OSError as error:
            return f"(no log: {error.strerror})"


class Server:
    """A program of the lab that answers HTTP; what engines and the router have in common."""

    __slots__ = ()
    port: int
    program: Program

    @property
    def url(self) -> str:
        """Return the address that it answers at."""
        return f"http://{ports.HOST}:{self.port}"

    @property
    def command(self) -> tuple[str, ...]:
        """Return its command line."""
        return self.program.command

    @property
    def log(self) -> Path:
        """Return the file that holds its output."""
        return self.program.log

    @property
    def pid(self) -> int:
        """Return the id of its first process; raise LabError before it has been started."""
        return self.program.pid

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Return its first process; raise LabError before it has been started."""
        if self.program.process is None:
            raise LabError(f"{self.program.name} has not been started")
        return self.program.process
