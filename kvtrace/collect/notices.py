"""What a recorder has to say: each thing once, of one kind so many for people and for the store, the rest counted."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrace.collect.stats import Stats

SHOWN = 20
"""Of one kind so many are said; where the others can be read is said once."""
KEPT = 1000
"""Of one kind so many go into the store, so that a folder full of foreign files fills neither store nor memory."""
KINDS = 100
"""What would be one kind more counts with the rest."""

_PARTICULAR = re.compile(r"[\d/:'\"(]")


class Notices:
    """The messages of one recording; `stats` is told of those that people are to see and how many more there are."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._said: set[tuple[str, str]] = set()
        self._count: Counter[str] = Counter()
        self.unwritten: list[dict[str, str | int]] = []

    def add(self, subject: str, message: str) -> None:
        """Take in one sentence about a file or a part of the work."""
        # The names of foreign files may hold bytes that are no text, which is all that a store holds.
        subject, message = (said.encode(errors="backslashreplace").decode() for said in (subject, message))
        if (subject, message) in self._said:
            return
        kind = _kind(subject, message)
        if kind not in self._count and len(self._count) >= KINDS:
            kind = ""
        self._count[kind] += 1
        if self._count[kind] > SHOWN:
            self._stats.unsaid[kind] = self._count[kind] - SHOWN
        else:
            self._stats.messages.append(message if subject in message else f"{subject}: {message}")
        if self._count[kind] <= KEPT:
            self._said.add((subject, message))
            self.unwritten.append({"at_ns": time.time_ns(), "subject": subject, "message": message})
            self._stats.kept_messages += 1


def _kind(subject: str, message: str) -> str:
    """Return what messages of one kind have in common: a message without its subject, up to its first particular."""
    return _PARTICULAR.split(message.replace(subject, "").lstrip(": "), maxsplit=1)[0].strip()
