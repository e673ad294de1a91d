"""One request's graph: its points, stamped and derived, and the evidence that goes with them.

Stamped points are reduced to the one that counts; derived points come from steps and from the wire's bracket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtrace import align, ranks, stages
from kvtrace.evidence import NOTHING, Posts, Timeline
from kvtrace.legs import TRANSFER_STAGES
from kvtrace.model import Event, Point, Process, Request, Step, Straggler, Transfer
from kvtrace.modes import PULL, PUSH


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a walk needs beside the request: processes, what they posted and copied, timelines, pairs' least times."""

    processes: Mapping[int, Process]
    timelines: Mapping[str, Timeline]
    least_message_ns: Mapping[tuple[str, str], int]
    fastest_ns: Mapping[tuple[str, str, int], int]
    posted: Mapping[int, Posts] = field(default_factory=dict)
    copied: Mapping[int, Posts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Graph:
    """The points of one request by name, and the evidence needed to divide its waits.

    `last_rank` says which rank the others waited for, "" where there is one only. `straggler` is None then, and may
    be another one: a rank that held up the steps in which the last one could have looked for its KV.
    """

    points: Mapping[str, Point]
    transfer: Transfer | None
    prefill_steps: tuple[tuple[Step, bool], ...]
    decode_steps: tuple[tuple[Step, bool], ...]
    arrived_low_ns: int
    arrived_high_ns: int
    registration_arrival_ns: int | None
    last_rank: str = ""
    straggler: Straggler | None = None

    @property
    def held_up_by(self) -> str:
        """Return which rank held up the last one's steps, "" where none did for longer than that one was late."""
        found = self.straggler
        if found is None or found.rank == found.last:
            return ""
        return f"rank {found.rank} of D, which held up the steps of rank {found.last}"


def build(request: Request, around: Surroundings) -> Graph:
    """Return the request's points: stamped ones reduced to the one that counts, and the derived ones."""
    points: dict[str, Point] = {}
    for stage, events in request.events.items():
        points[stage] = _at(_chosen(stage, events))
    prefill = around.timelines.get(request.prefill_engine, NOTHING)
    decode = around.timelines.get(request.decode_engine, NOTHING)
    prefill_steps = _own_steps(request.events.get(stages.PREFILL_SCHEDULED.name, ()), prefill, 0)
    # The last prompt token is computed again on D to sample from: that step is the first token's, not a prefill.
    decode_steps = _own_steps(request.events.get(stages.DECODE_SCHEDULED.name, ()), decode, 1)
    _derive_prefill(points, request, prefill_steps)
    decode_steps = _derive_decode(points, request, decode_steps)
    reported = _settle(points, request)
    transfer = _last_transfer(request, reported)
    low_ns = high_ns = 0
    if transfer is not None:
        low_ns, arrived_ns, high_ns = bracket(transfer, _fastest(request, transfer, around))
        _place_transfer(points, transfer, arrived_ns)
        _narrow(points, request, transfer)
        # In push D waits for the notification, in pull for its own poll; the other sign only frees P's blocks.
        other = stages.TRANSFER_DONE if request.mode == PUSH and stages.NOTIFIED.name in points else stages.NOTIFIED
        points.pop(other.name, None)
    elif any(one.post_started_ns and not one.failed for one in request.transfers):
        # What other ranks moved is not what the last one waited for.
        for name in (*TRANSFER_STAGES, *((stages.NOTIFIED.name,) if request.mode == PULL else ())):
            points.pop(name, None)
    arrival_ns = _registration_arrival_ns(request, points, around)
    last_rank = _last_rank(request, transfer, reported)
    behind = ranks.straggler(request, decode, points[stages.ARRIVED.name].t_ns if transfer is not None else None)
    own = tuple(prefill_steps), tuple(decode_steps)
    return Graph(points, transfer, *own, low_ns, high_ns, arrival_ns, last_rank, behind)


def _at(event: Event) -> Point:
    return Point(event.t_ns, event.process)


def _chosen(stage: str, events: list[Event]) -> Event:
    """Return the event that counts: the first for starts, the last where every rank has to have got there."""
    if stage in _LAST_COUNTS:
        return max(events)
    return min(events)


_LAST_COUNTS = frozenset(
    stage.name
    for stage in (
        stages.REPORTED, stages.READY, stages.NOTIFIED, stages.REGISTRATION_SENT, stages.REGISTRATION_RECEIVED,
        stages.MATCHED, stages.SENDER_PICKED, stages.PREFILL_STAGED, stages.PREFILL_FINISHED, stages.LOAD_STARTED,
        stages.REGISTRATION_QUEUED,
    )
)  # fmt: skip


def _settle(points: dict[str, Point], request: Request) -> Event | None:
    """Let no completion count that came when its effect was there already; return the last rank's report.

    Completions come twice and late in the field. A leg that was sent again is on its way since the last sending.
    """
    seen = request.events
    for sent, arrived in (
        (stages.ROUTER_PREFILL_SENT, (stages.PREFILL_HTTP_RECEIVED, stages.PREFILL_ENQUEUED)),
        (stages.ROUTER_DECODE_SENT, (stages.DECODE_HTTP_RECEIVED, stages.DECODE_ENQUEUED)),
    ):
        limit = next((points[stage.name] for stage in arrived if stage.name in points), None)
        if sent.name in seen:
            points[sent.name] = _at(_latest(seen[sent.name], limit))
    if stages.READY.name in seen:
        points[stages.READY.name] = _at(_latest(seen[stages.READY.name], points.get(stages.DECODE_BEGUN.name)))
    if stages.REPORTED.name not in seen:
        return None
    reported = _latest(seen[stages.REPORTED.name], points.get(stages.READY.name))
    points[stages.REPORTED.name] = _at(reported)
    if stages.NOTIFIED.name in seen:
        own = [event for event in seen[stages.NOTIFIED.name] if event.process == reported.process]
        points[stages.NOTIFIED.name] = _at(_latest(own or seen[stages.NOTIFIED.name], _at(reported)))
    return reported


def _latest(events: list[Event], limit: Point | None) -> Event:
    """Return the last event that is not after `limit`, the last of all where none or no limit is."""
    fitting = [event for event in events if limit is None or event.t_ns <= limit.t_ns]
    return max(fitting or events)


def _narrow(points: dict[str, Point], request: Request, transfer: Transfer) -> None:
    """Let the stages that each rank passes by itself be those of the rank that the request waited for."""
    prepared = points.get(stages.PREPARED.name)
    for stage in _OF_THE_DRIVER[request.mode == PUSH]:
        own = [event for event in request.events.get(stage.name, ()) if event.process == transfer.process]
        if own:
            points[stage.name] = _at(_latest(own, prepared))
    if request.mode == PUSH and transfer.remote_process:
        for stage in (stages.REGISTRATION_QUEUED, stages.REGISTRATION_SENT):
            own = [event for event in request.events.get(stage.name, ()) if event.process == transfer.remote_process]
            if own:
                points[stage.name] = _at(max(own))


_OF_THE_DRIVER = {
    True: (stages.PREFILL_STAGED, stages.SENDER_PICKED, stages.MATCHED, stages.REGISTRATION_RECEIVED),
    False: (stages.LOAD_STARTED,),
}


def _last_rank(request: Request, transfer: Transfer | None, reported: Event | None) -> str:
    """Return which rank the others waited for, "" where there is one only."""
    heard = {event.a for event in request.events.get(stages.REPORTED.name, ())}
    if reported is not None and len(heard) > 1:
        return f"rank {reported.a} of D, the last of {len(heard)}"
    drivers = {one.rank for one in request.transfers}
    if transfer is not None and len(drivers) > 1:
        return f"the transfer of rank {transfer.rank}, the last of {len(drivers)}"
    return ""


def _own_steps(
    scheduled: list[Event] | tuple[Event, ...], timeline: Timeline, known_tokens: int
) -> list[tuple[Step, bool]]:
    """Return the own steps in order, each with whether more than `known_tokens` of the prompt were left."""
    made = ((event, timeline.made(event.a, event.t_ns)) for event in sorted(scheduled))
    return [(step, event.c + known_tokens < event.d) for event, step in made if step is not None]


def _derive_prefill(points: dict[str, Point], request: Request, own: list[tuple[Step, bool]]) -> None:
    prompt_steps = [step for step, is_prompt in own if is_prompt]
    if not prompt_steps:
        return
    process = request.events[stages.PREFILL_SCHEDULED.name][0].process
    points[stages.PREFILL_BEGUN.name] = Point(prompt_steps[0].scheduled_ns, process)
    if prompt_steps[-1].forwarded_ns:
        points[stages.PREFILL_COMPUTED.name] = Point(prompt_steps[-1].forwarded_ns, process)


def _derive_decode(points: dict[str, Point], request: Request, own: list[tuple[Step, bool]]) -> list[tuple[Step, bool]]:
    """Place D's derived points and return the own steps up to the one that yields the first token."""
    scheduled = sorted(request.events.get(stages.DECODE_SCHEDULED.name, ()))
    seen = {(step.step, step.scheduled_ns) for step, _ in own}
    needed = []
    for event, pair in zip((e for e in scheduled if (e.a, e.t_ns) in seen), own, strict=True):
        needed.append(pair)
        if event.c + event.b >= event.d:
            break
    else:
        return needed
    process = scheduled[0].process
    points[stages.DECODE_BEGUN.name] = Point(needed[0][0].scheduled_ns, process)
    last = needed[-1][0]
    if last.forwarded_ns:
        points[stages.DECODE_COMPUTED.name] = Point(last.forwarded_ns, process)
    if last.ended_ns:
        points[stages.DECODE_SAMPLED.name] = Point(last.ended_ns, process)
    return needed


def _last_transfer(request: Request, reported: Event | None) -> Transfer | None:
    """Return the transfer that completed last of those that the last rank of D waited for, None if none was seen.

    In push nobody may say whose a write was: it is then anybody's.
    """
    posted = [transfer for transfer in request.transfers if transfer.post_started_ns and not transfer.failed]
    if reported is not None:
        is_push = request.mode == PUSH
        whose = (0, reported.process) if is_push else (reported.process,)
        posted = [one for one in posted if (one.remote_process if is_push else one.process) in whose]
    return max(posted, key=lambda one: (align.completion_ns(one), one.post_ended_ns), default=None)


def _fastest(request: Request, transfer: Transfer, around: Surroundings) -> int:
    key = (request.prefill_engine, request.decode_engine, transfer.moved_bytes.bit_length())
    return around.fastest_ns.get(key, 0)


def bracket(transfer: Transfer, fastest_ns: int) -> tuple[int, int, int]:
    """Return (earliest, likely, latest) unix ns of the last byte's arrival.

    Earliest is the last poll that said in progress, else the start of the post; latest is the first sign of completion.
    In between the wire is taken to end as early as the pair's fastest seen transfer of that size allows.
    """
    high_ns = align.completion_ns(transfer)
    low_ns = max(transfer.post_started_ns, transfer.last_pending_ns)
    if not high_ns:
        return low_ns, max(low_ns, transfer.post_ended_ns), max(low_ns, transfer.post_ended_ns)
    if high_ns >= transfer.post_ended_ns:
        # The last descriptor is posted when the call returns, so no earlier end is possible.
        low_ns = max(low_ns, transfer.post_ended_ns)
    low_ns = min(low_ns, high_ns)
    return low_ns, min(max(transfer.post_started_ns + fastest_ns, low_ns), high_ns), high_ns


def _place_transfer(points: dict[str, Point], transfer: Transfer, arrived_ns: int) -> None:
    for stage, t_ns in (
        (stages.PREPARED, transfer.prepared_ns),
        (stages.POST_STARTED, transfer.post_started_ns),
        (stages.POST_ENDED, transfer.post_ended_ns),
        (stages.TRANSFER_DONE, transfer.done_ns),
        (stages.ARRIVED, arrived_ns),
    ):
        if t_ns:
            points[stage.name] = Point(t_ns, transfer.process)
        else:
            points.pop(stage.name, None)


def _registration_arrival_ns(request: Request, points: Mapping[str, Point], around: Surroundings) -> int | None:
    """Return when the registration could have been read by P: sent, plus the pair's least message time. Unix ns."""
    sent = points.get(stages.REGISTRATION_SENT.name)
    if sent is None:
        received = points.get(stages.REGISTRATION_RECEIVED.name)
        return received.t_ns if received is not None else None
    return sent.t_ns + around.least_message_ns.get((request.decode_engine, request.prefill_engine), 0)
