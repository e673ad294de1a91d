"""Scenes in which engines have several workers: every rank's own steps, transfers, notices and reports."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvtrace import stages
from kvtrace.model import Event
from tests.trace import MS, D, P

RANK_SPACING = 10
"""Processes of two ranks of an engine are so many numbers apart."""


class Shape(NamedTuple):
    """How many workers P and D have, in how many transfers each of the side that drives moves its part.

    `pipelined`: in stages of a pipeline all workers bear rank 0.
    """

    prefill: int = 1
    decode: int = 1
    parts: int = 1
    pipelined: bool = False

    @property
    def moves(self) -> int:
        """Return about how many transfers a request has."""
        return max(self.prefill, self.decode) * self.parts


ONE = Shape()
SHAPES = (
    ONE, ONE, ONE, Shape(2, 2), Shape(2, 2), Shape(4, 4), Shape(2, 1), Shape(1, 2), Shape(2, 4), Shape(1, 1, 2),
    Shape(2, 2, 2), Shape(2, 2, pipelined=True),
)  # fmt: skip
_RANK_FIRST = frozenset(
    one.name
    for one in (
        stages.PREFILL_STAGED, stages.SENDER_PICKED, stages.REGISTRATION_RECEIVED, stages.MATCHED, stages.NOTIFIED,
        stages.LOAD_STARTED, stages.REGISTRATION_QUEUED, stages.REGISTRATION_SENT, stages.REPORTED,
    )
)  # fmt: skip
_RANK_SECOND = frozenset(
    one.name for one in (stages.STEP_STARTED, stages.STEP_FORWARDED, stages.STEP_CONNECTED, stages.WORKER_STARVED)
)
_TRANSFER = ("transfer.prepared", "transfer.post_", "transfer.done", "transfer.failed", "transfer.probed")
_OF_THREAD = frozenset((stages.SENDER_WOKE.name, stages.SENDER_SLEPT.name))


def shape_of(seed: str) -> Shape:
    """Return the shape of a scene of that seed."""
    return random.Random(seed).choice(SHAPES)


def of_other_ranks(events: Iterable[Event], shape: Shape, first_process: int, rng: random.Random) -> Iterator[Event]:
    """Yield what the other ranks do of what the first of each side does: later for a time of its own, some of it never.

    A request's events of one rank come later together, and each a little for itself; a few come twice.
    """
    later: dict[tuple[str, int, int], int] = {}
    for event in events:
        side = event.process - first_process
        if side not in (P, D):
            continue
        is_transfer = event.stage.startswith(_TRANSFER)
        if not is_transfer and event.stage not in _RANK_FIRST | _RANK_SECOND | _OF_THREAD:
            continue
        parts = shape.parts if is_transfer or event.stage == stages.NOTIFIED.name else 1
        for rank in range(shape.prefill if side == P else shape.decode):
            for part in range(parts):
                if (rank, part) == (0, 0) or rng.random() < 0.01:
                    continue
                key = (event.request, rank, part)
                by_ns = later.setdefault(key, int(rng.choice((0, 1, -0.2)) * rng.expovariate(1 / 3) * MS))
                copy = _of_rank(event, rank, 0 if shape.pipelined else rank, part)
                copy = copy._replace(t_ns=copy.t_ns + by_ns + rng.choice((0, 0, rng.randrange(MS // 2))))
                yield copy
                if rng.random() < 0.01:
                    yield copy._replace(t_ns=copy.t_ns + rng.randrange(3 * MS))


def _of_rank(event: Event, worker: int, rank: int, part: int) -> Event:
    process = event.process + RANK_SPACING * worker
    if event.stage in _RANK_FIRST:
        return event._replace(process=process, a=rank)
    if event.stage in _RANK_SECOND:
        if event.stage == stages.STEP_CONNECTED.name and event.c:  # as long as rank 0's, or longer, begun otherwise
            return event._replace(process=process, b=rank, c=event.c + event.t_ns % 3 * worker, d=event.d // (1 + rank))
        return event._replace(process=process, b=rank)
    if event.stage in _OF_THREAD:
        return event._replace(process=process)
    number = event.a + 1_000_000_000 * part + worker
    return event._replace(process=process, a=number, c=rank if event.stage == stages.PREPARED.name else event.c)


def workers(shape: Shape) -> dict[int, tuple[int, int]]:
    """Return the process numbers of the other workers, each with that of its engine's core, and the engine's width."""
    found = {}
    for core, width in ((P, shape.prefill), (D, shape.decode)):
        for worker in range(1, width):
            found[core + RANK_SPACING * worker] = (core, 1 if shape.pipelined else width)
    return found
