"""Processes that write to a private spool folder, or may once they have started: those that were given it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtrace.emit import SPOOL_VARIABLE
from kvtrace.wording import plural

_SHOWN = 3
_PROC = Path("/proc")


class Writer(NamedTuple):
    """One process and what it is called; another user's is not seen."""

    pid: int
    name: str


def given(folder: Path) -> list[Writer]:
    """Return the running processes in whose environment events go to `folder`."""
    wanted = f"{SPOOL_VARIABLE}={folder.absolute()}".encode()
    found = []
    for path in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(Writer(int(path.name), (path / "comm").read_text(errors="replace").strip()))
    return sorted(found)


def told(writers: list[Writer]) -> str:
    """Return who they are, for people: the first few, and how many there are."""
    named = ", ".join(f"{one.pid} {one.name if one.name.isprintable() else '?'}" for one in writers[:_SHOWN])
    more = ", …" if len(writers) > _SHOWN else ""
    return f"{plural(len(writers), 'process', 'processes')} that the command left running ({named}{more})"
