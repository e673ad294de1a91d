"""What else is to be said of a request beside its verdict: one clause for each oddity that was seen, none for none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvtrace import integrity, stages
from kvtrace.graph import Graph, Surroundings
from kvtrace.model import Blocks, Event, Integrity, Request
from kvtrace.modes import PUSH
from kvtrace.verdict import CORRUPT, ENDS_EARLY, read_too_late
from kvtrace.wording import ms, plural, seconds

# An engine that has gone on for this long would have let go, if it was ever to.
PATIENCE_NS = 1_000_000_000
# Engines of a quiet deployment rest for seconds; what wakes slowly has slept for longer.
IDLE_NS = 5_000_000_000


def remarks(request: Request, graph: Graph, around: Surroundings, blocks: Blocks, idle_ns: int | None) -> list[str]:
    """Return the clauses that the request's note consists of, besides the reason of its verdict."""
    return [
        *_attempts(request),
        *_cut_short(request),
        *_computed_again(request),
        *_completions(request),
        *_engines(request),
        *_clocks(request, around),
        *_holdings(request, around, blocks),
        *_reservation(request, blocks),
        *_idle(idle_ns),
        *_handles(request, graph),
    ]


def _first(request: Request, *wanted: stages.Stage) -> Event | None:
    found = (request.events[stage.name][0] for stage in wanted if stage.name in request.events)
    return min(found, default=None, key=lambda event: event.t_ns)


def _attempts(request: Request) -> Iterator[str]:
    if request.lost:
        names = ", ".join(one.request_id for one in request.lost)
        spent = ms(request.lost[-1].end_ns - request.lost[0].start_ns)
        attempts = plural(len(request.lost), "earlier attempt")
        yield f"{attempts} ({names}) lost, which cost {spent} before this one began"


def _cut_short(request: Request) -> Iterator[str]:
    """Say that an answer that had begun did not become whole."""
    seen = request.events
    token = _first(request, stages.ROUTER_FIRST_TOKEN) or _first(request, stages.DECODE_FIRST_TOKEN_OUT)
    if token is None or stages.ROUTER_DONE.name in seen or stages.DECODE_FINISHED.name in seen:
        return
    over = _first(request, *ENDS_EARLY, stages.ROUTER_FAILED)
    if over is not None and over.t_ns >= token.t_ns:
        yield f"the answer was cut short {ms(over.t_ns - token.t_ns)} after its first token ({over.stage})"


def _computed_again(request: Request) -> Iterator[str]:
    """Say that P computed parts of the prompt more than once."""
    scheduled = request.events.get(stages.PREFILL_SCHEDULED.name, ())
    reach = again = 0
    for event in sorted(scheduled):
        again += max(0, min(reach, event.c + event.b) - event.c)
        reach = max(reach, event.c + event.b)
    if again > 0:
        why = " after a preemption" if stages.PREFILL_PREEMPTED.name in request.events else ""
        yield f"P computed {plural(again, 'prompt token')} twice{why}"
    finished = request.events.get(stages.PREFILL_FINISHED.name)
    if finished and finished[0].b and not finished[0].a:
        yield "P finished with no blocks to hand over"


def _completions(request: Request) -> Iterator[str]:
    """Say which completions came twice, too late, or to a worker that knew nothing of the request."""
    seen = request.events
    reported = Counter((event.process, event.a) for event in seen.get(stages.REPORTED.name, ()))
    for (process, rank), count in sorted(reported.items()):
        if count > 1:
            own = {one.b for one in seen[stages.REPORTED.name] if (one.process, one.a) == (process, rank)}
            by = f", by its connectors {' and '.join(map(str, sorted(own)))}" if len(own) > 1 else ""
            yield f"rank {rank} of D reported the KV {plural(count, 'time')}{by}"
    over = _first(request, stages.DECODE_FINISHED, stages.DECODE_ABORTED)
    signs = [stages.READY, stages.REPORTED, *([stages.NOTIFIED] if request.mode == PUSH else [])]
    late = [event for stage in signs for event in seen.get(stage.name, ()) if over and event.t_ns > over.t_ns]
    if over is not None and late:
        yield f"a completion ({min(late).stage}) came {ms(min(late).t_ns - over.t_ns)} after its end on D"
    for event in seen.get(stages.ORPHANED.name, ()):
        begun = _first(request, stages.LOAD_STARTED, stages.REGISTRATION_QUEUED)
        early = " yet" if begun is not None and event.t_ns < begun.t_ns else ""
        yield f"a completion notification came to a worker (rank {event.a}) that did not know the request{early}"


def _engines(request: Request) -> Iterator[str]:
    """Say that D turned to another engine than the one that computed the prompt."""
    told = {event.ref for event in request.events.get(stages.LOAD_STARTED.name, ()) if event.ref}
    if request.prefill_engine and told and request.prefill_engine not in told:
        yield f"D was told to read from {', '.join(sorted(told))}, and {request.prefill_engine} has the prompt"


def _clocks(request: Request, around: Surroundings) -> Iterator[str]:
    """Say that blocks seem to have been used after they were let go, where clocks that may disagree say so."""
    if request.events.get(stages.READY.name) and (late := read_too_late(request, around, by_wall_clocks=True)):
        yield f"by the wall clocks of two hosts, which may disagree, {late}"


def _holdings(request: Request, around: Surroundings, blocks: Blocks) -> Iterator[str]:
    """Say that P holds blocks that nobody will come for, or held them past their lease."""
    if not blocks.held_blocks:
        return
    timeline = around.timelines.get(request.prefill_engine)
    last_ns = timeline.last_ns if timeline is not None else 0
    kept = _first(request, stages.PREFILL_FINISHED)
    needless_ns = _needless_ns(request)
    if blocks.held_ns is None and needless_ns is not None and last_ns - needless_ns >= PATIENCE_NS:
        yield (
            f"P was not seen to let its {plural(blocks.held_blocks, 'block')} go, "
            f"{seconds(last_ns - needless_ns)} after nobody needed them any more"
        )
    deadline_ns = _deadline_ns(request)
    if kept is None or deadline_ns is None:
        return
    until_ns = kept.t_ns + blocks.held_ns if blocks.held_ns is not None else last_ns
    if until_ns - deadline_ns >= PATIENCE_NS:
        yield f"P held {plural(blocks.held_blocks, 'block')} {seconds(until_ns - deadline_ns)} past their lease"


def _needless_ns(request: Request) -> int | None:
    """Return from when on nobody needed P's blocks: every transfer was done, or the request was over. Unix ns."""
    done = [max(one.done_ns, one.notified_ns) for one in request.transfers]
    over = _first(request, *ENDS_EARLY, stages.ROUTER_FAILED)
    ends = [over.t_ns] if over is not None else []
    if done and all(done):
        ends.append(max(done))
    return min(ends, default=None)


def _deadline_ns(request: Request) -> int | None:
    """Return the latest that the lease can have ended, unix ns; an extension is at most as long as the lease was."""
    started = request.events.get(stages.LEASE_STARTED.name)
    if not started:
        return None
    extended: list[Event] = [*request.events.get(stages.LEASE_EXTENDED.name, ())]
    latest_ns = [max(event.t_ns for event in (one, *extended)) + one.b for one in started]
    return max(latest_ns)


def _reservation(request: Request, blocks: Blocks) -> Iterator[str]:
    """Say that D kept blocks for KV when the request ended."""
    is_waiting = stages.DECODE_ABORTED.name in request.events and stages.READY.name not in request.events
    if is_waiting and blocks.reserved_blocks:
        yield f"D had {plural(blocks.reserved_blocks, 'block')} reserved for KV that had not come when it was aborted"


def _idle(idle_ns: int | None) -> Iterator[str]:
    if idle_ns is not None and idle_ns >= IDLE_NS:
        yield f"the engine had made no step for {seconds(idle_ns)} when the request came"


def _handles(request: Request, graph: Graph) -> Iterator[str]:
    if graph.last_rank and len(request.transfers) > 1:
        yield f"it waited for {graph.held_up_by or graph.last_rank}"


def of_integrity(request: Request, around: Surroundings, checked: Integrity | None, verdict: str) -> Iterator[str]:
    """Yield what the verdict leaves out: blocks that differ, a late read behind them, blocks that nobody checked."""
    if checked is None:
        return
    if verdict == CORRUPT and (late := read_too_late(request, around)) is not None:
        yield late
    if checked.corrupt and verdict != CORRUPT:
        yield integrity.told(checked, request.mode)
    if checked.unchecked:
        why = f": {'; '.join(checked.why)}" if checked.why else ""
        whole = plural(checked.checked + checked.unchecked, "block")
        yield f"{checked.unchecked} of {whole} could not be checked{why}"
