"""What became of a hand-off, and the sentence that says why: from what was seen, never from what is usual."""

from __future__ import annotations

from collections.abc import Mapping

from kvtrace import align, integrity, stages
from kvtrace.graph import Surroundings, bracket
from kvtrace.legs import CANCELLED
from kvtrace.model import NEVER_NS, Event, Integrity, Request, Transfer
from kvtrace.modes import LOCAL, PULL, PUSH
from kvtrace.wording import ms, plural

COMPLETE, INCOMPLETE, ABORTED = "complete", "incomplete", "aborted"
EXPIRED, FAILED, RECOMPUTED, NO_HANDOFF, CORRUPT = "expired", "failed", "recomputed", "no handoff", "corrupt"
VERDICTS: Mapping[str, str] = {
    COMPLETE: "every rank's every transfer was seen complete",
    INCOMPLETE: "records that the hand-off must have left are missing",
    ABORTED: "the request was aborted before its answer was whole",
    EXPIRED: "P gave the blocks up before they were handed over",
    FAILED: "the request or its hand-off failed",
    RECOMPUTED: "D computed prompt tokens itself instead of using the hand-off",
    NO_HANDOFF: "no KV was handed over for this request",
    CORRUPT: "D went on from other KV than P had computed, by the checksums of both",
}
"""What became of a hand-off, each with the sentence that says so."""
UNDER_WAY = "under way"
"""What is said in the place of a verdict while a request may still get its first token."""
ALARMING = (FAILED, EXPIRED, CORRUPT)
"""What must not become of one; that its client leaves, or that records are missing, is another matter."""

ENDS_EARLY = (
    stages.ROUTER_CANCELLED,
    stages.DECODE_ABORTED,
    stages.PREFILL_ABORTED,
    stages.DECODE_HTTP_DISCONNECTED,
)
Verdict = tuple[str, str]


def verdict(request: Request, around: Surroundings, checked: Integrity | None = None, *, has_token: bool) -> Verdict:
    """Return the verdict and its reason; `checked` is what checksums say of the blocks, None without any."""
    if not has_token:
        return _without_answer(request)
    if checked is not None and checked.corrupt and stages.LOAD_FAILED.name not in request.events:
        return CORRUPT, f"the output is suspect: {integrity.told(checked, request.mode)}"
    return _of_answer(request, around)


def _without_answer(request: Request) -> Verdict:
    seen = request.events
    ends = (*ENDS_EARLY, stages.PREFILL_HTTP_DISCONNECTED)
    last = last_stage(request, before=ends)
    if stages.ROUTER_FAILED.name in seen:
        return FAILED, f"the router gave up: {seen[stages.ROUTER_FAILED.name][0].ref}"
    if (refused := _refusal(request)) is not None:
        return FAILED, refused
    if stages.LEASE_EXPIRED.name in seen:
        return EXPIRED, f"P's lease ended before the blocks were handed over{_waiting_on_d(request)}"
    if any(stage.name in seen for stage in ends):
        return ABORTED, f"the request was aborted before its first token, after {last}"
    if stages.CLIENT_FAILED.name in seen:
        reason = seen[stages.CLIENT_FAILED.name][0].ref
        return ABORTED if reason == CANCELLED else FAILED, f"its client had no answer: {reason}"
    if stages.LOAD_FAILED.name in seen or stages.TRANSFER_FAILED.name in seen:
        return FAILED, f"the hand-off failed{_reasons(request)}"
    return INCOMPLETE, f"no first token was recorded; the last point is {last_stage(request)}"


def _refusal(request: Request) -> str | None:
    """Return which engine turned the request away before it was admitted, None if none did."""
    for done, enqueued, side in (
        (stages.PREFILL_HTTP_DONE, stages.PREFILL_ENQUEUED, "P"),
        (stages.DECODE_HTTP_DONE, stages.DECODE_ENQUEUED, "D"),
    ):
        status = max((event.a for event in request.events.get(done.name, ())), default=0)
        is_out = enqueued.name not in request.events or (side == "D" and status < 500 and is_stand_in(request))
        if status >= 400 and is_out:
            return f"{side} refused the request (HTTP {status})"
    return None


def is_stand_in(request: Request) -> bool:
    """Return whether D only had what vLLM adds in the place of a refused request: one token, aborted at once."""
    looked_at = (stages.DECODE_CONSIDERED, stages.DECODE_ALLOCATED, stages.DECODE_SCHEDULED)
    told = request.events.get(stages.DECODE_ENQUEUED.name, ())
    is_over = stages.DECODE_ABORTED.name in request.events
    return is_over and [one.a for one in told] == [1] and not any(stage.name in request.events for stage in looked_at)


def _waiting_on_d(request: Request) -> str:
    """Return that D still waits, where it was not told of the end: it has no lease of its own."""
    seen = request.events
    told = (stages.READY, stages.LOAD_FAILED, stages.DECODE_ABORTED, stages.DECODE_FINISHED)
    if stages.DECODE_ALLOCATED.name in seen and not any(stage.name in seen for stage in told):
        return ", and D was not seen to learn of it"
    return ""


def _reasons(request: Request) -> str:
    reasons = {transfer.reason for transfer in request.transfers if transfer.failed and transfer.reason}
    told = f": {', '.join(sorted(reasons))}" if reasons else ""
    if stages.LOAD_FAILED.name not in request.events and stages.DECODE_ALLOCATED.name in request.events:
        told += "; D was not seen to be told"
    return told


def _of_answer(request: Request, around: Surroundings) -> Verdict:
    seen = request.events
    if stages.LOAD_FAILED.name in seen:
        return RECOMPUTED, "the load failed and D computed the prompt itself"
    enqueued = seen.get(stages.DECODE_ENQUEUED.name)
    if not enqueued:
        whose = "D's scheduler" if stages.REPORTED.name in seen else "the engine that answered"
        return INCOMPLETE, f"no event of {whose}"
    if not enqueued[0].c:
        return NO_HANDOFF, _why_none(request)
    if (late := read_too_late(request, around)) is not None:
        return EXPIRED, f"the output is suspect: {late}"
    failed = [transfer for transfer in request.transfers if transfer.failed]
    if failed:
        told = f"{len(failed)} of {plural(len(request.transfers), 'transfer')} failed and D went on"
        return FAILED, f"the output is suspect: {told}{_reasons(request)}"
    if (own := _computed_on_d(request)) is not None:
        return own
    if stages.READY.name not in seen:
        return INCOMPLETE, "D's scheduler was not seen to learn that the KV is there"
    if stages.PREFILL_ENQUEUED.name not in seen:
        return INCOMPLETE, "no event of the engine that computed the prompt"
    if not request.transfers:
        return INCOMPLETE, "no transfer was recorded"
    return _of_transfers(request, around)


def _why_none(request: Request) -> str:
    seen = request.events
    decided = seen.get(stages.ROUTER_DECIDED.name)
    if decided and decided[0].ref == LOCAL:
        return "the router sent it to D alone"
    finished = seen.get(stages.PREFILL_FINISHED.name)
    if finished and not finished[0].b:
        return "P computed the prompt and was not asked to keep its blocks; D was not told of any KV to take over"
    if finished:
        return "P keeps the prompt's blocks and D was not told of them"
    return "D was not told of any KV to take over"


def read_too_late(request: Request, around: Surroundings, *, by_wall_clocks: bool = False) -> str | None:
    """Return by how much blocks were read or written after P had let them go; None if they were not.

    P lets go in an orderly way after it has heard of the read, which D may notice later still: only a transfer that
    began after that tells of a fault. A lease that ends unread is one while the transfer is not over.

    Only times of one clock prove it. With `by_wall_clocks` only those of two are compared, which prove nothing, and a
    release of which P was told before is no fault then.
    """
    found: list[tuple[int, str]] = []
    for stage, told in (
        (stages.LEASE_EXPIRED, "the transfer was over {} after P's lease had ended"),
        (stages.PREFILL_RELEASED, "the transfer began {} after P had let the blocks go"),
    ):
        let_go = min(request.events.get(stage.name, ()), default=None)
        if let_go is None or (by_wall_clocks and stage is stages.PREFILL_RELEASED and _was_told(let_go, request)):
            continue
        for transfer in request.transfers:
            is_apart = align.crosses_hosts(let_go.process, transfer.process, around.processes)
            if transfer.failed or not transfer.post_started_ns or is_apart is not by_wall_clocks:
                continue
            is_lease = stage is stages.LEASE_EXPIRED
            seen_ns = bracket(transfer, 0)[2] if is_lease else transfer.post_started_ns
            if let_go.t_ns < seen_ns:
                found.append((seen_ns - let_go.t_ns, told))
        if found:
            late_ns, sentence = max(found)
            return sentence.format(ms(late_ns))
    return None


def _was_told(let_go: Event, request: Request) -> bool:
    """Return whether P had been told of the read before it let go, by its own clock."""
    told = request.events.get(stages.NOTIFIED.name, ())
    return request.mode == PULL and any(event.t_ns <= let_go.t_ns for event in told)


def _computed_on_d(request: Request) -> Verdict | None:
    """Return the verdict where D computed what was to be handed over, or had it all; None for a usual hand-off.

    The last prompt token is always computed on D, to sample from.
    """
    seen = request.events
    steps = sorted(seen.get(stages.DECODE_SCHEDULED.name, ()))
    remote = max((event.b for event in seen.get(stages.DECODE_ALLOCATED.name, ())), default=0)
    if not steps:
        return None if remote or stages.READY.name in seen else (INCOMPLETE, "no hand-off was seen")
    last = _first_token_step(steps)
    begun = min(event.c for event in steps if event.t_ns <= last.t_ns)
    own, prompt = last.d - begun, last.d
    if remote:
        local = max((event.a for event in seen.get(stages.DECODE_CONSIDERED.name, ())), default=0)
        if begun < min(local + remote, prompt) - 1:
            again = " after a preemption" if _preempted_before(request, last.t_ns) else ""
            told = f"D computed {own:,} of {plural(prompt, 'prompt token')} itself{again}"
            return RECOMPUTED, f"{told}, {remote:,} were to come from P"
        return None
    if stages.READY.name in seen:
        return None
    if own <= 1:
        return COMPLETE, "D had the whole prompt cached: nothing had to move"
    told = f"it computed {own:,} of {plural(prompt, 'prompt token')} itself"
    return RECOMPUTED, f"D was told of KV and took none over: {told}"


def _first_token_step(steps: list[Event]) -> Event:
    """Return the scheduling that completes the prompt, else the last one."""
    return next((event for event in steps if event.c + event.b >= event.d), steps[-1])


def _preempted_before(request: Request, t_ns: int) -> bool:
    return any(event.t_ns <= t_ns for event in request.events.get(stages.DECODE_PREEMPTED.name, ()))


def _of_transfers(request: Request, around: Surroundings) -> Verdict:
    transfers: list[Transfer] = request.transfers
    unseen = [transfer for transfer in transfers if not align.completion_ns(transfer)]
    if unseen:
        seen = f"{'was' if len(unseen) == 1 else 'were'} never seen complete"
        return INCOMPLETE, f"{len(unseen)} of {plural(len(transfers), 'transfer')} {seen}"
    notified = request.events.get(stages.NOTIFIED.name, ())
    if request.mode == PUSH and notified and len(notified) < len(transfers):
        return INCOMPLETE, f"D was told of {len(notified)} of {plural(len(transfers), 'write')}"
    ranks = {event.a for event in request.events.get(stages.REPORTED.name, ())}
    expected = _width(request.decode_engine, around)
    if len(ranks) < expected:
        return INCOMPLETE, f"{len(ranks)} of {expected} ranks of D reported the KV"
    drivers, moving, side = len({transfer.process for transfer in transfers}), expected, "D"
    if request.mode == PUSH:
        # Of more ranks on P than on D, which may hold the same, not every one need write.
        moving, side = _width(request.prefill_engine, around), "P"
        moving = moving if moving <= expected else 1
    if drivers < moving:
        return INCOMPLETE, f"transfers of {drivers} of {moving} ranks of {side} were recorded"
    return COMPLETE, ""


def _width(engine: str, around: Surroundings) -> int:
    return max((one.tp_size for one in around.processes.values() if one.engine == engine), default=1)


def last_stage(request: Request, before: tuple[stages.Stage, ...] = ()) -> str:
    """Return the last stage that was reached; with `before`, the last one ahead of the first of those."""
    seen = request.events
    limit_ns = min((seen[stage.name][0].t_ns for stage in before if stage.name in seen), default=NEVER_NS)
    ends = {stage.name for stage in before} | integrity.STAGES
    reached = [
        (event.t_ns, name) for name, events in seen.items() if name not in ends for event in events
        if event.t_ns <= limit_ns
    ]  # fmt: skip
    return max(reached, default=(0, "none"))[1]
