"""Which rank of D the others waited for: the last to report the KV, or one that held up the steps of the last.

The ranks of an engine begin each step together. So a rank that is slow in one step is why the others look for their
own KV later, and may report before them.
"""

from __future__ import annotations

from collections import defaultdict

from kvtrace import stages
from kvtrace.evidence import Timeline
from kvtrace.model import Request, Straggler


def straggler(request: Request, timeline: Timeline, from_ns: int | None) -> Straggler | None:
    """Return the rank of D that kept the others waiting longest, and for how long; None where one rank only reported.

    The last one to report is not to blame for the time in which another held up its steps. `from_ns` (unix ns) is when
    the KV that was waited for had arrived; where that is None, unknown, nobody but the last one is named: its KV may
    have been under way while another held up its steps.
    """
    reported: dict[int, int] = {}
    for event in request.events.get(stages.REPORTED.name, ()):
        reported[event.a] = max(reported.get(event.a, 0), event.t_ns)
    if len(reported) < 2:
        return None
    (_, before_ns), (last, last_ns) = sorted(reported.items(), key=lambda item: item[1])[-2:]
    held_ns = _held_ns(timeline, from_ns, last_ns) if from_ns is not None else {}
    waited_ns = {rank: duration_ns for rank, duration_ns in held_ns.items() if rank != last}
    meanwhile_ns = sum(ns for rank, ns in _held_ns(timeline, before_ns, last_ns).items() if rank != last)
    waited_ns[last] = last_ns - before_ns - meanwhile_ns
    rank = max(waited_ns, key=lambda one: (waited_ns[one], one == last))
    return Straggler(rank, waited_ns[rank], last)


def _held_ns(timeline: Timeline, start_ns: int, end_ns: int) -> dict[int, int]:
    """Return by rank for how long it was the only one still in a step, within that time, in ns."""
    found: dict[int, int] = defaultdict(int)
    if not timeline.has_ranks:
        return found
    running = timeline.running(start_ns)
    for step in [*([running] if running is not None else []), *timeline.between(start_ns + 1, end_ns)]:
        if not step.ranks:
            continue
        # A rank with nothing to do in a step without a forward is not shown in it: it is through at once.
        connected_ns, rank = step.ranks[-1]
        others_ns = step.ranks[-2][0] if len(step.ranks) > 1 else step.started_ns
        found[rank] += max(0, min(connected_ns, end_ns) - max(others_ns, start_ns))
    return found
