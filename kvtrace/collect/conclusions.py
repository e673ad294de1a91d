"""Table `finding` of a recording: written anew as often as its part of a processor pays for, and at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtrace.findings import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrace.store import Store

SHARE = 0.02
"""At most this part of one processor goes into findings while recording."""
NEWEST = 20_000
"""Findings of a recording under way are those of so many requests, since nothing is recorded while they are gathered:
some 20 us of processor time a request."""


class Conclusions:
    """What a recording says in plain words, kept in its store."""

    def __init__(self, notice: Callable[[str, str], None]) -> None:
        self.is_behind = False  # answers have changed since
        self._notice = notice
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether findings are to be written anew."""
        return self.is_behind and time.monotonic() >= self._next_s

    def refresh(self, store: Store) -> bool:
        """Write what the newest requests say, if it is time; return whether it was."""
        if not self.is_due:
            return False
        spent_s = time.process_time()
        self._write(store, NEWEST, "failed and are tried again with the next answers")
        self._next_s = time.monotonic() + (time.process_time() - spent_s) * (1 / SHARE - 1)
        return True

    def finish(self, store: Store) -> None:
        """Write what the recording says in the end, when its facts say that it is complete."""
        self._write(store, table.MOST, "failed at the end, so the store may hold older ones or none")

    def _write(self, store: Store, newest: int, failed: str) -> None:
        """Write findings; a failure is noted, and costs nothing else."""
        self.is_behind = False
        try:
            with store.transaction():
                table.write(store, newest)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the answers must come out
            self._notice("findings", f"{failed}: {type(error).__name__}: {error}")
