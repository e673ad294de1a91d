"""What the vocabulary is made of: classes, causes, points in time and edges, as values.

`kvtrace.stages` declares them. Standard library only, since engine processes import this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Where(StrEnum):
    """The process kind in which a point is stamped."""

    CLIENT = "client"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"
    ENGINE = "engine"
    PROCESS = "process"


class Class(StrEnum):
    """What a request was doing: the three answers, compute told apart as run and queue, and no answer."""

    RUN = "compute.run"
    QUEUE = "compute.queue"
    COORDINATION = "coordination"
    TRANSFER = "transfer"
    UNATTRIBUTED = "unattributed"

    @property
    def answer(self) -> str:
        """Return the coarse class: compute, coordination, transfer or unattributed."""
        return self.value.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Field:
    """One payload field of a stage: its slot on the wire (a, b, c, d or ref), name, unit, sentence."""

    slot: str
    name: str
    unit: str
    doc: str


@dataclass(frozen=True, slots=True)
class Cause:
    """A finer name for a segment: its class, where the time passed, a sentence, what usually helps, else by mode."""

    name: str
    kind: Class
    where: Where
    doc: str
    remedy: str
    push: str = ""
    pull: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """One point in time: code on the wire, name everywhere else."""

    code: int
    name: str
    where: Where
    doc: str
    fields: tuple[Field, ...] = ()
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """A dependency: `after` waits for `before`, and the time between is charged to `cause`.

    `split` names what divides the time further (see `kvtrace.splits`), "" for none.
    """

    before: Stage
    after: Stage
    cause: Cause
    split: str = ""
