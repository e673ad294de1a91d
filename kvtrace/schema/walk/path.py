"""The walk in SQL: at every point the last-arriving predecessor, then the chain of them back from the first token."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from collections.abc import Sequence

from kvtrace import stages
from kvtrace.schema.walk.plan import NUMBER, POINTS, Node, column, layers, nodes

_STARTS = ("prefill.http_received", "decode.http_received", "prefill.enqueued", "decode.enqueued")
_ENDS = ("router.first_token", "decode.first_token_out", "decode.sampled", "decode.computed")
_FAR = 64
"""Added to the number of a point that stands in for a direct predecessor: the bit above the number's own six."""
STRAYED = 1 << 62
"""The bit of a path on which somewhere a farther ancestor stands in, or none was found."""
_YEARS_NS = 1 << 56
"""Times farther apart than this, more than two years, would not fit into one number with a point's number."""
APART = "points that are years apart"


def walked(edges: Sequence[stages.Edge]) -> list[tuple[str, str]]:
    """Return the CTEs `e` (where a path begins and ends) to `w`: which points are on it, and since when each waited.

    `i_` is a point's time since the path's begin with its number in the lowest six bits, so that the greatest of
    several says which one arrived last and when. `q_` is the number of the point that was waited for, `_FAR` more where
    it is a farther ancestor (of number 0 where there is none), NULL off the path. `s_` is when the wait began.
    """
    graph = nodes(edges)
    start = f"coalesce(router_received, least({', '.join(map(column, _STARTS))}))"
    end = " ".join(f"WHEN {column(name)} IS NOT NULL THEN {NUMBER[name]}" for name in _ENDS)
    token = f"coalesce({', '.join(map(column, _ENDS))})"
    times = ", ".join(column(name) for name in POINTS)
    since = ", ".join(
        f"({column(name)} - CASE WHEN NOT apart THEN begin_ns END) * 64 + {NUMBER[name]} AS i_{column(name)}"
        for name in POINTS
    )
    direct = ", ".join(f"{_direct(node)} AS a_{column(node.name)}" for node in graph)
    picks = ", ".join(f"{_picked(node)} AS q_{column(node.name)}" for node in graph)
    kept = {node.name: f"on_path & {1 << NUMBER[node.name]} <> 0 AND {column(node.name)} > begin_ns" for node in graph}
    waits = ", ".join(
        f"CASE WHEN {kept[node.name]} THEN CASE WHEN {_arrived(node)} IS NULL "
        f"THEN greatest(begin_ns, times[q_{column(node.name)} & 63]) "
        f"ELSE begin_ns + (greatest(0, {_arrived(node)}) >> 6) END END AS s_{column(node.name)}"
        for node in graph
    )
    only = ", ".join(
        f"CASE WHEN {kept[node.name]} THEN q_{column(node.name)} END AS q_{column(node.name)}" for node in graph
    )
    return [
        (
            "e",
            f"""SELECT *, CASE WHEN token_ns >= begin_ns THEN last END AS n0 FROM (SELECT *, {start} AS begin_ns,
      {token} AS token_ns, CASE {end} END AS last,
      coalesce(greatest({times}) // 2 - least({times}) // 2 > {_YEARS_NS // 2}, false) AS apart FROM g)""",
        ),
        ("c", f"SELECT *, {since}, [{times}] AS times FROM e"),
        ("a", f"SELECT *, {direct} FROM c"),
        ("q", f"SELECT *, {picks} FROM a"),
        ("m", _chain(edges)),
        ("w", f"SELECT * REPLACE ({only}), {waits} FROM m"),
    ]


def _arrived(node: Node) -> str:
    return f"a_{column(node.name)}"


def _direct(node: Node) -> str:
    """Return the last-arriving direct predecessor, NULL if there is none."""
    before = [f"i_{column(edge.before.name)}" for edge in node.incoming]
    mine = f"i_{column(node.name)} | 63"
    fitting = [f"CASE WHEN {one} <= {mine} THEN {one} END" for one in before]
    return f"greatest({', '.join(fitting)})" if len(fitting) > 1 else "".join(fitting) or "NULL::BIGINT"


def _picked(node: Node) -> str:
    """Return the number of the point that was waited for."""
    mine = column(node.name)
    farther = str(_FAR)
    if node.farther:
        ranked = ", ".join(
            str(100 * level + NUMBER[name]) for level, names in enumerate(node.farther, start=1) for name in names
        )
        farther = (
            f"{_FAR} + list_reduce(list_filter([0, {ranked}], lambda i: i = 0 OR times[i % 100] <= {mine}), "
            "lambda i, j: CASE WHEN i = 0 OR (i // 100 = j // 100 AND times[j % 100] > times[i % 100]) "
            "THEN j ELSE i END) % 100"
        )
    return f"coalesce({_arrived(node)} & 63, CASE WHEN {mine} > begin_ns THEN {farther} ELSE 0 END)"


def _chain(edges: Sequence[stages.Edge]) -> str:
    """Return the SELECT that follows the predecessors from the end and gathers the points on the way as bits.

    A layer of the graph at a time, the last first: who is on the path then puts whom it waited for there.
    """
    sql = "SELECT *, coalesce(1::BIGINT << n0, 0) AS on_path FROM q"
    for layer in layers(edges):
        turns = " | ".join(
            f"((on_path >> {NUMBER[name]}) & 1) * ((1::BIGINT << (q_{column(name)} & 63)) | "
            f"((q_{column(name)} >> 6) << 62))"
            for name in layer
        )
        sql = f"SELECT * REPLACE (on_path | {turns} AS on_path) FROM (\n  {sql})"
    return sql
