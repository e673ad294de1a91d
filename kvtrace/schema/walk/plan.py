"""The graph as a plan for SQL: the points' numbers, their layers, and where each looks for what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from kvtrace import stages


def _ordered() -> tuple[str, ...]:
    """Return the points in an order in which of two predecessors of one point the one declared later comes later.

    Where predecessors arrive together the last declared one counts, which is then the one with the greater number.
    """
    before: dict[str, set[str]] = {
        name: set() for name in dict.fromkeys(end.name for edge in stages.EDGES for end in (edge.before, edge.after))
    }
    for after in before:
        for earlier, later in pairwise(edge.before.name for edge in stages.EDGES if edge.after.name == after):
            before[later].add(earlier)
    return tuple(TopologicalSorter(before).static_order())


POINTS: tuple[str, ...] = _ordered()
"""The points of the graph; the place in it, from 1, is the point's number in SQL."""
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


def layers(edges: Sequence[stages.Edge]) -> list[list[str]]:
    """Return the points by how far the end of the graph is from them at most, the nearest first."""
    after: dict[str, set[str]] = {name: set() for name in POINTS}
    for edge in edges:
        after[edge.before.name].add(edge.after.name)
    far: dict[str, int] = {}
    for name in TopologicalSorter(after).static_order():
        far[name] = 1 + max((far[one] for one in after[name]), default=-1)
    return [[name for name in POINTS if far[name] == one] for one in range(max(far.values()) + 1)]
