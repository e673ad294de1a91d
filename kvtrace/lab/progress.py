"""What is going on, shown on stderr: one live line per thing on a terminal, one printed line per change elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvtrace import messages


class Progress:
    """States of named things while they change."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._began_s = time.monotonic()
        self._states: dict[str, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Begin to draw, where stderr is a terminal."""
        if not self._quiet and sys.stderr.isatty():
            self._live = Live(self._table(), console=Console(stderr=True), transient=True, get_renderable=self._table)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop drawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, name: str, state: str) -> None:
        """Say what `name` is doing now."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        if self._live is None and not self._quiet:
            messages.write(f"{time.monotonic() - self._began_s:6.1f} s  {name}: {state}\n")

    def note(self, text: str) -> None:
        """Say something once, in full."""
        if not self._quiet:
            messages.write(f"{text}\n")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            table.add_row(f"{time.monotonic() - self._began_s:6.1f} s", name, state)
        return table
