"""Who chooses P and D: the interface that policies implement, and round robin."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine as the router knows it at the moment of the choice."""

    index: int
    """Its place among the engines of its side."""
    url: str
    inflight: int
    """Requests that this router has in flight on it."""
    tokens: int
    """Prompt tokens of those, as far as they are known: prompts sent as text count as none."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every engine that could be chosen, by side."""

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """The request to be placed, as much of it as the router knows."""

    request_id: str
    path: str
    body_bytes: int
    prompt_tokens: int | None
    """Length of the prompt where it was sent as token ids, else None."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen P and D, by index."""

    prefill: int
    decode: int


class Policy(Protocol):
    """Chooses a P and a D. Called on the event loop for each attempt, so it answers at once."""

    def choose(self, request: Question, candidates: Candidates) -> Decision:
        """Return the pair that serves `request`."""


class RoundRobin:
    """Every P and every D in turn, and over time every pair of them."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Question, candidates: Candidates) -> Decision:  # noqa: ARG002
        """Return the next pair; the two sides are shifted against each other after each full lap."""
        turn, prefills, decodes = self._turn, len(candidates.prefill), len(candidates.decode)
        self._turn += 1
        return Decision(turn % prefills, (turn + turn // lcm(prefills, decodes)) % decodes)
