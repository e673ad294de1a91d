"""The walk in SQL: at every point the last-arriving predecessor, then the chain of them back from the first token."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from collections.abc import Sequence

from kvtrace import stages
from kvtrace.schema.walk.plan import NUMBER, POINTS, Node, column, longest, nodes

_STARTS = ("prefill.http_received", "decode.http_received", "prefill.enqueued", "decode.enqueued")
_ENDS = ("router.first_token", "decode.first_token_out", "decode.sampled", "decode.computed")


def walked(edges: Sequence[stages.Edge]) -> list[tuple[str, str]]:
    """Return the CTEs `e` (where a path begins and ends) to `w`: which points are on it, and since when each waited.

    `q_` is the number of the point that was waited for: negative where a farther ancestor stands in, 0 for none.
    `s_` is when the wait for a point began; NULL where the point is not on the path.
    """
    graph = nodes(edges)
    start = f"coalesce(router_received, least({', '.join(map(column, _STARTS))}))"
    end = " ".join(f"WHEN {column(name)} IS NOT NULL THEN {NUMBER[name]}" for name in _ENDS)
    token = f"coalesce({', '.join(map(column, _ENDS))})"
    direct = ", ".join(f"{_direct(node)} AS a_{column(node.name)}" for node in graph)
    times = ", ".join(column(name) for name in POINTS)
    chosen = {node.name: f"q_{column(node.name)}" for node in graph}
    picks = ", ".join(f"{_picked(node)} AS {chosen[node.name]}" for node in graph)
    numbers = ", ".join(chosen.get(name, "0") for name in POINTS)
    kept = {node.name: f"on_path & {1 << NUMBER[node.name]} <> 0 AND {column(node.name)} > begin_ns" for node in graph}
    waits = ", ".join(
        f"CASE WHEN {kept[node.name]} THEN greatest(begin_ns, coalesce(a_{column(node.name)}, "
        f"times[-{chosen[node.name]}])) END AS s_{column(node.name)}"
        for node in graph
    )
    only = ", ".join(
        f"CASE WHEN {kept[node.name]} THEN {chosen[node.name]} END AS {chosen[node.name]}" for node in graph
    )
    return [
        (
            "e",
            f"""SELECT *, CASE WHEN token_ns >= begin_ns THEN last END AS n0 FROM (SELECT *, {start} AS begin_ns,
      {token} AS token_ns, CASE {end} END AS last FROM g)""",
        ),
        ("c", f"SELECT *, {direct}, [{times}] AS times FROM e"),
        ("q", f"SELECT *, {picks} FROM c"),
        ("m", _chain(numbers, longest(edges))),
        ("w", f"SELECT * REPLACE ({only}), {waits} FROM m"),
    ]


def _direct(node: Node) -> str:
    """Return when the last-arriving direct predecessor was there, NULL if there is none."""
    mine = column(node.name)
    before = [column(edge.before.name) for edge in node.incoming]
    return f"greatest({', '.join(f'CASE WHEN {one} <= {mine} THEN {one} END' for one in before) or 'NULL::BIGINT'})"


def _picked(node: Node) -> str:
    """Return the number of the predecessor: of direct ones that arrived together the last declared one."""
    mine, arrived = column(node.name), f"a_{column(node.name)}"
    direct = " ".join(
        f"WHEN {column(edge.before.name)} THEN {NUMBER[edge.before.name]}" for edge in reversed(node.incoming)
    )
    farther = ""
    if node.farther:
        ranked = ", ".join(
            str(100 * level + NUMBER[name]) for level, names in enumerate(node.farther, start=1) for name in names
        )
        farther = (
            f" ELSE -list_reduce(list_filter([0, {ranked}], lambda i: i = 0 OR times[i % 100] <= {mine}), lambda i, j: "
            "CASE WHEN i = 0 OR (i // 100 = j // 100 AND times[j % 100] > times[i % 100]) THEN j ELSE i END) % 100"
        )
    return (
        f"CASE WHEN {mine} IS NULL OR {mine} <= begin_ns THEN 0 WHEN {arrived} IS NOT NULL "
        f"THEN {f'CASE {arrived} {direct} END' if direct else '0'}{farther or ' ELSE 0'} END"
    )


def _chain(numbers: str, most: int) -> str:
    """Return the SELECT that follows the predecessors from the end and gathers the points on the way as bits.

    One number holds both: the point that the walk is at in its lowest six bits, above them a bit for each point passed.
    """
    turns = ", ".join(["0::BIGINT"] * most)
    step = (
        "CASE WHEN s & 63 = 0 THEN s ELSE (s >> 6 << 6) | (1::BIGINT << ((s & 63) + 6)) | "
        "coalesce(abs(before[s & 63]), 0) END"
    )
    walk = f"list_reduce([coalesce(n0, 0)::BIGINT, {turns}], lambda s, i: {step}) >> 6 AS on_path"
    return f"SELECT *, {walk} FROM (SELECT *, [{numbers}]::BIGINT[] AS before FROM q)"
