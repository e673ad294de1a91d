"""Events to requests: which legs, exchanges and transfers belong together, and by what evidence they were joined."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvtrace import stages
from kvtrace.legs import FRONT, PUSH, Leg, split
from kvtrace.model import Event, Process, Request, Transfer

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_INDEX_SUFFIX = re.compile(r"-(\d+)$")
_PREFIX = re.compile(r"^(?:cmpl|chatcmpl|resp|embd|score|rerank|pool|classify)-")
_TRANSFER_STAGES = frozenset(
    (
        stages.PREPARED.name,
        stages.POST_STARTED.name,
        stages.POST_ENDED.name,
        stages.TRANSFER_DONE.name,
        stages.TRANSFER_FAILED.name,
        stages.PROBED.name,
    )
)


def base_ids(engine_request: str) -> list[str]:
    """Return the ids a front end may have sent for this engine-side id, likeliest first.

    vLLM puts a prefix before the id, the prompt's index behind it (completions only) and a random suffix behind that.
    """
    stem = _PREFIX.sub("", engine_request)
    is_completion = engine_request.startswith("cmpl-")
    candidates = []
    for text in (_RANDOM_SUFFIX.sub("", stem), stem):
        if is_completion and _INDEX_SUFFIX.search(text):
            candidates.append(_INDEX_SUFFIX.sub("", text))
        candidates.append(text)
    return list(dict.fromkeys(candidates))


def assemble(events: Iterable[Event], processes: Mapping[int, Process]) -> list[Request]:
    """Return one Request per attempt, in order of its first event.

    Legs join by what the engines themselves say (P's id in the decode leg's parameters, or the match that P's sender
    made), else by the id that both legs carry; `join_method` says which. A leg that finds no partner is a request too.
    """
    sorted_events = sorted(events)
    legs, fronts, loose = split(sorted_events, processes)
    named = set(fronts)
    groups: dict[str, _Group] = defaultdict(_Group)
    for key, one in legs.items():
        base = next((i for i in base_ids(key[1]) if i in named), base_ids(key[1])[0])
        groups[base].legs.append(one)
    for base, front in fronts.items():
        groups[base].front = front
    links = _links(sorted_events)
    requests: list[Request] = []
    for base, group in groups.items():
        requests.extend(_join(base, group, links, processes))
    _attach_remote(requests, loose)
    for request in requests:
        request.transfers = _transfers(request, processes)
    return sorted(requests, key=_first_ns)


class _Group:
    """Everything under one base id."""

    __slots__ = ("front", "legs")

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.front: list[Event] = []


def _links(events: list[Event]) -> dict[str, tuple[str, str]]:
    """Return decode-side id -> (prefill-side id, method), from what the engines themselves said."""
    links: dict[str, tuple[str, str]] = {}
    for event in events:
        if event.stage == stages.DECODE_ENQUEUED.name and event.ref:
            links.setdefault(event.request, (event.ref, "remote_request_id"))
    for event in events:
        if event.stage == stages.MATCHED.name and event.ref:
            links[event.ref] = (event.request, "matched")
    return links


def _join(
    base: str, group: _Group, links: dict[str, tuple[str, str]], processes: Mapping[int, Process]
) -> list[Request]:
    prefills = {leg.name: leg for leg in group.legs if leg.side == "prefill"}
    decodes = [leg for leg in group.legs if leg.side == "decode"]
    pairs: list[tuple[Leg | None, Leg | None, str]] = []
    unpaired = []
    for decode in decodes:
        remote, method = links.get(decode.name, ("", ""))
        prefill = prefills.pop(remote, None)
        if prefill is None:
            unpaired.append(decode)
        else:
            pairs.append((prefill, decode, method))
    for decode in unpaired:
        name = next(iter(prefills), None)
        pairs.append((None, decode, "none") if name is None else (prefills.pop(name), decode, "base_id"))
    pairs.extend((prefill, None, "none") for prefill in prefills.values())
    if not pairs:
        pairs = [(None, None, "none")]
    pairs.sort(key=_pair_ns)
    exchanges = _exchanges(group.front)
    requests = []
    for position, (prefill_leg, decode_leg, method) in enumerate(pairs):
        named = decode_leg or prefill_leg
        name = base if len(pairs) == 1 or named is None else named.name
        request = Request(request_id=name, join_method=method)
        _fill(request, [event for event in group.front if event.stage.startswith(FRONT)])
        for side, part in (("prefill", prefill_leg), ("decode", decode_leg)):
            if part is not None:
                _fill(request, part.events)
            _fill(request, _nth_exchange(exchanges[side], position))
        request.prefill_engine = _engine(prefill_leg, processes)
        request.decode_engine = _engine(decode_leg, processes)
        received, sent = (request.events.get(s.name, ()) for s in (stages.ROUTER_RECEIVED, stages.CLIENT_SENT))
        request.client_request_id = next((event.ref for event in (*received, *sent) if event.ref), "")
        if received:
            request.attempt = received[0].a
        request.mode = _mode(request, prefill_leg, decode_leg)
        requests.append(request)
    return requests


def _pair_ns(pair: tuple[Leg | None, Leg | None, str]) -> int:
    return min((leg.events[0].t_ns for leg in pair[:2] if leg is not None), default=0)


def _exchanges(front: list[Event]) -> dict[str, list[list[Event]]]:
    """Return the HTTP exchanges of one id per side, in time order; a new one begins with each `http_received`."""
    exchanges: dict[str, list[list[Event]]] = {"prefill": [], "decode": []}
    for event in front:
        side = event.stage.partition(".")[0]
        if side not in exchanges:
            continue
        if event.stage.endswith("http_received") or not exchanges[side]:
            exchanges[side].append([])
        exchanges[side][-1].append(event)
    return exchanges


def _nth_exchange(exchanges: list[list[Event]], position: int) -> list[Event]:
    if not exchanges:
        return []
    return exchanges[min(position, len(exchanges) - 1)]


def _fill(request: Request, events: list[Event]) -> None:
    for event in events:
        request.events.setdefault(event.stage, []).append(event)


def _engine(leg: Leg | None, processes: Mapping[int, Process]) -> str:
    if leg is None:
        return ""
    process = processes.get(leg.engine)
    return process.engine if process is not None else ""


def _mode(request: Request, prefill: Leg | None, decode: Leg | None) -> str:
    seen = request.events
    decided = seen.get(stages.ROUTER_DECIDED.name)
    if any(
        stage in seen
        for stage in (
            stages.MATCHED.name,
            stages.REGISTRATION_SENT.name,
            stages.REGISTRATION_QUEUED.name,
            stages.SENDER_PICKED.name,
        )
    ):
        return PUSH
    if stages.LOAD_STARTED.name in seen:
        return "pull"
    begun = seen.get(stages.TRANSFER_BEGUN.name)
    if begun and begun[0].ref:
        return begun[0].ref
    if decided and decided[0].ref in (PUSH, "pull"):
        return decided[0].ref
    if decode is not None and prefill is None:
        enqueued = seen.get(stages.DECODE_ENQUEUED.name)
        return "local" if enqueued and not enqueued[0].c else "unknown"
    return "unknown"


def _attach_remote(requests: list[Request], loose: list[Event]) -> None:
    """Give each request the events that carry the other side's id: P's receipt of D's registration, orphans."""
    by_decode_id: dict[str, Request] = {}
    for request in requests:
        for stage in (
            stages.DECODE_ENQUEUED.name,
            stages.DECODE_ALLOCATED.name,
            stages.NOTIFIED.name,
            stages.REGISTRATION_SENT.name,
        ):
            for event in request.events.get(stage, ()):
                by_decode_id.setdefault(event.request, request)
    for request in requests:
        for event in request.events.get(stages.MATCHED.name, ()):
            by_decode_id.setdefault(event.ref, request)
    for event in loose:
        owner = by_decode_id.get(event.request)
        if owner is not None:
            owner.events.setdefault(event.stage, []).append(event)


def _transfers(request: Request, processes: Mapping[int, Process]) -> list[Transfer]:
    found: dict[tuple[int, int], Transfer] = {}
    for stage in _TRANSFER_STAGES:
        for event in request.events.get(stage, ()):
            transfer = found.setdefault((event.process, event.a), Transfer(event.process, event.a))
            _note(transfer, stage, event, processes)
    notified = request.events.get(stages.NOTIFIED.name, ())
    for transfer in found.values():
        if request.mode == PUSH and notified:
            transfer.notified_ns = max(event.t_ns for event in notified)
    return sorted(found.values(), key=lambda transfer: (transfer.post_started_ns, transfer.process, transfer.number))


def _note(transfer: Transfer, stage: str, event: Event, processes: Mapping[int, Process]) -> None:
    offset_ns = processes[event.process].offset_ns if event.process in processes else 0
    if stage == stages.PREPARED.name:
        transfer.prepared_ns, transfer.descriptors = event.t_ns, event.b
        transfer.rank, transfer.remote_request = event.c, event.ref
    elif stage == stages.POST_STARTED.name:
        transfer.post_started_ns = event.t_ns
    elif stage == stages.POST_ENDED.name:
        transfer.post_ended_ns, transfer.moved_bytes = event.t_ns, event.b
        transfer.descriptors, transfer.done_at_post = event.c, event.d == 1
    elif stage == stages.TRANSFER_FAILED.name:
        transfer.failed = True
    else:
        if event.b:
            transfer.last_pending_ns = max(transfer.last_pending_ns, event.b + offset_ns)
        if stage == stages.TRANSFER_DONE.name:
            transfer.done_ns = event.t_ns
        else:
            transfer.probed_ns = event.t_ns


def _first_ns(request: Request) -> int:
    return min((events[0].t_ns for events in request.events.values()), default=0)
