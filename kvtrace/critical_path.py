"""One request's graph, walked back from its first token to the last-arriving predecessor, again and again.

This is the reference walk: `path` returns segments that tile [start, first token] exactly, in integer nanoseconds.
Edges and causes come from `kvtrace.stages`; how the time of one edge splits comes from `kvtrace.splits`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtrace import align, splits, stages
from kvtrace.graph import Graph, Surroundings
from kvtrace.legs import CLIENT
from kvtrace.model import Point, Request, Segment

_INCOMING: dict[str, tuple[stages.Edge, ...]] = {
    name: tuple(edge for edge in stages.EDGES if edge.after.name == name)
    for name in {edge.after.name for edge in stages.EDGES}
}
# Where a request can begin to be seen, outermost first; the scope follows from what is there.
_STARTS = (
    stages.ROUTER_RECEIVED.name,
    stages.PREFILL_HTTP_RECEIVED.name,
    stages.DECODE_HTTP_RECEIVED.name,
    stages.PREFILL_ENQUEUED.name,
    stages.DECODE_ENQUEUED.name,
)
# Where the first token is seen, outermost first.
_ENDS = (
    stages.ROUTER_FIRST_TOKEN.name,
    stages.DECODE_FIRST_TOKEN_OUT.name,
    stages.DECODE_SAMPLED.name,
    stages.DECODE_COMPUTED.name,
)
# A client sees its request from outside: all else comes after it was sent, and the first of these before its token.
_CLIENT = (stages.CLIENT_SENT.name, stages.CLIENT_FIRST_TOKEN.name)
_BEFORE_TOKEN = (*_ENDS, stages.REPORTED.name)  # outermost first


def ends(points: Mapping[str, Point]) -> tuple[str | None, str | None]:
    """Return the names of the points at which the request is first seen and at which its first token is."""
    start, end = _seen_ends(points)
    # Clocks that disagree by more than the whole request: no interval can be told.
    return start, None if backwards_ns(points) is not None else end


def backwards_ns(points: Mapping[str, Point]) -> int | None:
    """Return by how much the first token is stamped before the start, in ns; None where it is not, or was not seen."""
    start, end = _seen_ends(points)
    if start is None or end is None or points[end].t_ns >= points[start].t_ns:
        return None
    return points[start].t_ns - points[end].t_ns


def _seen_ends(points: Mapping[str, Point]) -> tuple[str | None, str | None]:
    outside_ns = outside_client_ns(points)
    if outside_ns is not None and outside_ns <= 0:
        return _CLIENT
    start = next((name for name in _STARTS[:1] if name in points), None)
    if start is None:
        seen = [name for name in _STARTS if name in points]
        start = min(seen, key=lambda name: points[name].t_ns, default=None)
    return start, next((name for name in _ENDS if name in points), None)


def outside_client_ns(points: Mapping[str, Point]) -> int | None:
    """Return by how much, in ns, other points stick out of the client's record; None without a whole one.

    More than 0 means that the clocks disagree by at least that much: then no place can be told for the record.
    """
    sent, token = (points.get(name) for name in _CLIENT)
    if sent is None or token is None:
        return None
    first_ns = min((point.t_ns for name, point in points.items() if not name.startswith(CLIENT)), default=sent.t_ns)
    last_ns = next((points[name].t_ns for name in _BEFORE_TOKEN if name in points), token.t_ns)
    return max(sent.t_ns - first_ns, last_ns - token.t_ns, sent.t_ns - token.t_ns)


def path(graph: Graph, request: Request, around: Surroundings) -> list[Segment]:
    """Return the critical path's segments in time order; they tile [start, first token]. [] without both ends."""
    start, end = ends(graph.points)
    if start is None or end is None:
        return []
    begin_ns = graph.points[start].t_ns
    at = graph.points[end]
    name = end
    segments: list[Segment] = []
    while at.t_ns > begin_ns:
        edge, before = _last_arriving(name, at, graph.points)
        if edge is None or before is None:
            segments.append(Segment(begin_ns, at.t_ns, stages.UNKNOWN.name, f"whatever preceded {name}"))
            break
        from_ns = max(before.t_ns, begin_ns)
        crosses = align.crosses_hosts(before.process, at.process, around.processes)
        parts = splits.divide(edge, from_ns, at.t_ns, graph, request, around)
        segments.extend(Segment(*part, crosses_hosts=crosses) for part in reversed(parts))
        name, at = edge.before.name, before
    segments.reverse()
    return _merged(segments)


def _merged(segments: list[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    last = None
    for segment in segments:
        what = (segment.cause, segment.waited_for, segment.crosses_hosts)
        if what == last:
            merged[-1] = Segment(merged[-1].start_ns, segment.end_ns, *what)
        else:
            merged.append(segment)
        last = what
    return merged


def _last_arriving(name: str, at: Point, points: Mapping[str, Point]) -> tuple[stages.Edge | None, Point | None]:
    """Return the last-arriving predecessor and its edge.

    When no direct predecessor was recorded, the last-arriving of the nearest recorded ancestors stands in, and the
    time since it is unattributed: evidence is missing, so nothing is guessed.
    """
    best: tuple[stages.Edge | None, Point | None] = (None, None)
    for edge in _INCOMING.get(name, ()):
        before = points.get(edge.before.name)
        if before is None or before.t_ns > at.t_ns:
            continue
        if best[1] is None or before.t_ns >= best[1].t_ns:
            best = (edge, before)
    if best[1] is not None:
        return best
    seen, frontier = {name}, [name]
    while frontier:
        ancestors = [edge.before for one in frontier for edge in _INCOMING.get(one, ()) if edge.before.name not in seen]
        present = [
            (points[stage.name], stage)
            for stage in ancestors
            if stage.name in points and points[stage.name].t_ns <= at.t_ns
        ]
        if present:
            before, stage = max(present, key=lambda pair: pair[0].t_ns)
            return stages.Edge(stage, stages.BY_NAME.get(name, stage), stages.UNKNOWN), before
        seen.update(stage.name for stage in ancestors)
        frontier = [stage.name for stage in dict.fromkeys(ancestors)]
    return None, None
