"""The graph as a plan for SQL: points in topological order, and where each looks for what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtrace import stages

POINTS: tuple[str, ...] = tuple(dict.fromkeys(end.name for edge in stages.EDGES for end in (edge.before, edge.after)))
"""The points of the graph in order of declaration; the place in it, from 1, is the point's number in SQL."""
NUMBER: dict[str, int] = {name: place for place, name in enumerate(POINTS, start=1)}


def column(name: str) -> str:
    """Return the name of the column that holds a point's time."""
    return name.replace(".", "_")


@dataclass(frozen=True, slots=True)
class Node:
    """One point, its direct edges in order, and behind them its farther ancestors, the nearest first."""

    name: str
    incoming: tuple[stages.Edge, ...]
    farther: tuple[tuple[str, ...], ...]


def nodes(edges: Sequence[stages.Edge]) -> list[Node]:
    """Return every point with what `critical_path` looks through for it, in that order."""
    incoming = {name: tuple(edge for edge in edges if edge.after.name == name) for name in POINTS}
    found = []
    for name in POINTS:
        levels: list[tuple[str, ...]] = []
        seen, frontier = {name}, [name]
        while frontier:
            level = [edge.before.name for one in frontier for edge in incoming[one] if edge.before.name not in seen]
            frontier = list(dict.fromkeys(level))
            seen.update(frontier)
            if frontier:
                levels.append(tuple(frontier))
        found.append(Node(name, incoming[name], tuple(levels[1:])))
    return found


def longest(edges: Sequence[stages.Edge]) -> int:
    """Return how many points the longest path has."""
    length: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in length:
            length[name] = 1 + max((of(edge.before.name) for edge in edges if edge.after.name == name), default=0)
        return length[name]

    return max(of(name) for name in POINTS)
