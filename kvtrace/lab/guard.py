"""The process beside a lab that takes everything down if the lab's own process is killed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtrace.lab import takedown

if TYPE_CHECKING:
    from pathlib import Path


class Guard:
    """A running `takedown.guard`: it hears of every server, and acts once its stdin ends without a dismissal."""

    def __init__(self, marker: str, folder: Path) -> None:
        """Start it for the lab of that marker, whose folder it removes too."""
        self._process = subprocess.Popen(  # noqa: S603 -- a file of this package
            [sys.executable, "-I", "-S", takedown.__file__, marker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._tell(f"folder {folder}")

    def watch(self, pid: int) -> None:
        """Tell it of a server, by the process group that `pid` leads."""
        self._tell(f"group {pid}")

    def dismiss(self) -> None:
        """Tell it that everything was taken down, and wait until it has ended."""
        self._tell("done")
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
