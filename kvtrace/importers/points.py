"""What every format's records become: points of a process of the file, and what is to be said about the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtrace.importers.source import Source
    from kvtrace.stages import Stage


class Placed(NamedTuple):
    """One point to store: unix ns, stage, the request's id, and which process of its file stamped it."""

    t_ns: int
    stage: Stage
    request: str
    part: str
    ref: str = ""
    a: int = 0
    b: int = 0


@dataclass(slots=True)
class Part:
    """One process of a file as far as the file tells it: facts, and the clock that it shares with others."""

    facts: dict[str, str]
    clock: str = ""


@dataclass(slots=True)
class Imported:
    """One file, placed: its points, its processes by name, how many records it held, what it could not give."""

    source: Source
    format: str
    records: int
    points: list[Placed] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    joined: int = 0
    said: list[str] = field(default_factory=list)
