"""Legs to requests: which legs, exchanges and transfers are one attempt, and by what evidence they were joined."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvtrace import attempts, legs, stages
from kvtrace.legs import FRONT, Leg
from kvtrace.model import Event, Process, Request, Transfer
from kvtrace.modes import LOCAL, PULL, PUSH, UNKNOWN

Pair = tuple[Leg | None, Leg | None, str]
"""P's leg and D's, either of them None, and the method that joined them."""


def assemble(events: Iterable[Event], processes: Mapping[int, Process]) -> list[Request]:
    """Return one Request per attempt, in order of its first event.

    Legs join by what the engines themselves say (the match that P's sender made, or P's id in the decode leg's
    parameters), else by the transfer_id that both were sent, else by the id that both carry; `join_method` says
    which. A leg that finds no partner is a request too, and so is every further answer to a prompt.
    """
    split = legs.split(sorted(events), processes)
    linked = _linked(split.legs)
    groups = _groups(split, linked)
    requests: list[Request] = []
    for base, (members, front) in groups.items():
        requests.extend(_join(base, members, front, linked, processes))
    _attach_loose(requests, split.loose)
    for request in requests:
        request.transfers = _transfers(request, processes)
    attempts.number(requests)
    return sorted(requests, key=lambda one: one.first_ns)


def _linked(found: list[Leg]) -> dict[int, tuple[Leg, str]]:
    """Return by the identity of D's leg P's leg and the method, from what the engines themselves said."""
    prefills: dict[str, list[Leg]] = defaultdict(list)
    decodes: dict[str, list[Leg]] = defaultdict(list)
    for leg in found:
        (prefills if leg.side == "prefill" else decodes)[leg.name].append(leg)
    linked: dict[int, tuple[Leg, str]] = {}
    for same in prefills.values():
        for leg in same:
            for event in leg.events:
                if event.stage == stages.MATCHED.name and event.ref in decodes:
                    decode = _latest(decodes[event.ref], event.t_ns)
                    linked[id(decode)] = (leg, "matched")
    for same in decodes.values():
        for leg in same:
            enqueued = leg.first(stages.DECODE_ENQUEUED)
            if id(leg) not in linked and enqueued is not None and enqueued.ref in prefills:
                linked[id(leg)] = (_latest(prefills[enqueued.ref], enqueued.t_ns), "remote_request_id")
    _link_by_transfer(found, linked)
    return linked


def _link_by_transfer(found: list[Leg], linked: dict[int, tuple[Leg, str]]) -> None:
    """Link what is left by the transfer_id of both legs, where it names one leg of P and not one of each prompt's."""
    sent: dict[str, list[Leg]] = defaultdict(list)
    for leg in found:
        if leg.side == "prefill" and (name := _transfer_id(leg)):
            sent[name].append(leg)
    for leg in found if sent else ():
        same = sent.get(_transfer_id(leg), ()) if leg.side == "decode" and id(leg) not in linked else ()
        if len(same) == 1:
            linked[id(leg)] = (same[0], "transfer_id")


def _transfer_id(leg: Leg) -> str:
    allocated = leg.first(stages.PREFILL_ALLOCATED if leg.side == "prefill" else stages.DECODE_ALLOCATED)
    return allocated.ref if allocated is not None else ""


def _latest(candidates: list[Leg], t_ns: int) -> Leg:
    """Return the last leg that had begun by then, else the first one."""
    begun = [leg for leg in candidates if leg.first_ns <= t_ns]
    return max(begun, key=lambda leg: leg.first_ns) if begun else candidates[0]


def _groups(split: legs.Split, linked: Mapping[int, tuple[Leg, str]]) -> dict[str, tuple[list[Leg], list[Event]]]:
    """Return by base id its legs and front ends' events. What an engine linked is one group, whatever the ids say."""
    base_of = dict(zip(map(id, split.legs), legs.bases(split.legs, split.fronts), strict=True))
    moved: dict[str, str] = {}
    for leg in split.legs:
        if (link := linked.get(id(leg))) is not None and base_of[id(link[0])] != base_of[id(leg)]:
            moved.setdefault(base_of[id(link[0])], base_of[id(leg)])
    groups: dict[str, tuple[list[Leg], list[Event]]] = {}
    for leg in split.legs:
        base = base_of[id(leg)]
        groups.setdefault(moved.get(base, base), ([], []))[0].append(leg)
    for name, events in split.fronts.items():
        groups.setdefault(moved.get(name, name), ([], []))[1].extend(events)
    return groups


def _join(
    base: str, members: list[Leg], front: list[Event], linked: Mapping[int, tuple[Leg, str]],
    processes: Mapping[int, Process],
) -> list[Request]:  # fmt: skip
    """Return the requests under one base id. The router's points belong to the pair that answered."""
    pairs = sorted(_pairs(members, linked), key=_pair_ns) or [(None, None, "none")]
    answered = _answered(pairs)
    asked = legs.exchanges(sorted(front))
    claimed = {
        "prefill": _claims([prefill for prefill, _, _ in pairs], asked["prefill"]),
        "decode": _claims([decode for _, decode, _ in pairs], asked["decode"]),
    }
    router = [event for event in sorted(front) if event.stage.startswith(FRONT)]
    requests = []
    for position, (prefill, decode, method) in enumerate(pairs):
        named = decode or prefill
        name = base if position == answered or named is None else named.name
        request = Request(request_id=name, base_id=base, join_method=method)
        for part in (prefill, decode):
            _fill(request, part.events if part is not None else [])
        for side in ("prefill", "decode"):
            _fill(request, claimed[side].get(position, []))
        if position == answered:
            _fill(request, router)
        elif claimed["decode"].get(position) is claimed["decode"].get(answered, []):
            # The exchange is shared with the answer that came first: the content that left was that one's.
            request.events.pop(stages.DECODE_FIRST_TOKEN_OUT.name, None)
        request.prefill_engine = _engine(prefill, processes)
        request.decode_engine = _engine(decode, processes)
        received, sent = (
            [event for event in router if event.stage == stage.name]
            for stage in (stages.ROUTER_RECEIVED, stages.CLIENT_SENT)
        )
        request.client_request_id = next((event.ref for event in (*received, *sent) if event.ref), "")
        if received:
            request.attempt = received[0].a
        request.mode = _mode(request, router, prefill, decode)
        requests.append(request)
    return requests


def _pairs(members: list[Leg], linked: Mapping[int, tuple[Leg, str]]) -> list[Pair]:
    """Return the legs of one base id in pairs: by link, by equal id, by id without suffix, or as the only two left."""
    decodes = [leg for leg in members if leg.side == "decode"]
    # Several answers to one prompt may name the same leg on P.
    links = ((leg, linked[id(leg)]) for leg in decodes if id(leg) in linked)
    pairs: list[Pair] = [(prefill, leg, method) for leg, (prefill, method) in links]
    taken = {id(leg) for pair in pairs for leg in pair[:2]}
    for key in (_name, _stem):
        prefills: dict[str, list[Leg]] = defaultdict(list)
        for leg in members:
            if leg.side == "prefill" and id(leg) not in taken:
                prefills[key(leg)].append(leg)
        for decode in decodes:
            alike = prefills[key(decode)] if id(decode) not in taken else []
            if alike:
                prefill = min(alike, key=lambda leg: abs(leg.first_ns - decode.first_ns))
                alike.remove(prefill)
                pairs.append((prefill, decode, "base_id"))
                taken |= {id(prefill), id(decode)}
    left = [leg for leg in members if id(leg) not in taken]
    if len(left) == 2 and {leg.side for leg in left} == {"prefill", "decode"}:
        first, second = sorted(left, key=lambda leg: leg.side == "decode")
        return [*pairs, (first, second, "base_id")]
    pairs.extend((None, leg, "none") if leg.side == "decode" else (leg, None, "none") for leg in left)
    return pairs


def _name(leg: Leg) -> str:
    return leg.name


def _stem(leg: Leg) -> str:
    return legs.stem(leg.name)


def _pair_ns(pair: Pair) -> int:
    return min((leg.first_ns for leg in pair[:2] if leg is not None), default=0)


def _answered(pairs: list[Pair]) -> int:
    """Return which pair the front end's answer came from: the first on D that had a step and was not aborted."""
    decodes = [(position, decode) for position, (_, decode, _) in enumerate(pairs) if decode is not None]
    begun = [one for one in decodes if one[1].has(stages.DECODE_SCHEDULED)]
    kept = [one for one in begun if not one[1].has(stages.DECODE_ABORTED)]
    return next(iter(kept or begun or decodes), (len(pairs) - 1, None))[0]


def _claims(sided: list[Leg | None], asked: list[list[Event]]) -> dict[int, list[Event]]:
    """Return by pair its HTTP exchange on one side: the last one begun before its leg, siblings the same.

    Exchanges whose leg was not seen go to the pairs without one, in order.
    """
    claimed: dict[int, list[Event]] = {}
    if not asked:
        return claimed
    starts = [one[0].t_ns for one in asked]
    used = set()
    for position, leg in enumerate(sided):
        if leg is not None:
            which = max(0, bisect_right(starts, leg.first_ns) - 1)
            claimed[position] = asked[which]
            used.add(which)
    left = [one for which, one in enumerate(asked) if which not in used]
    lacking = [position for position, leg in enumerate(sided) if leg is None]
    # The answer of a lone pair is its own even where its engine was not seen.
    claimed.update(zip(lacking, left, strict=False))
    return claimed


def _fill(request: Request, events: Iterable[Event]) -> None:
    for event in events:
        request.events.setdefault(event.stage, []).append(event)


def _engine(leg: Leg | None, processes: Mapping[int, Process]) -> str:
    if leg is None:
        return ""
    process = processes.get(leg.process)
    return process.engine if process is not None else ""


_SIGNS_OF_PUSH = (stages.MATCHED, stages.REGISTRATION_SENT, stages.REGISTRATION_QUEUED, stages.SENDER_PICKED)


def _mode(request: Request, router: list[Event], prefill: Leg | None, decode: Leg | None) -> str:
    seen = request.events
    if any(stage.name in seen for stage in _SIGNS_OF_PUSH):
        return PUSH
    if stages.LOAD_STARTED.name in seen:
        return PULL
    begun = seen.get(stages.TRANSFER_BEGUN.name)
    if begun and begun[0].ref:
        return begun[0].ref
    decided = [event.ref for event in router if event.stage == stages.ROUTER_DECIDED.name]
    if decided and decided[0] in (PUSH, PULL, LOCAL):
        return decided[0]
    if decode is not None and prefill is None:
        enqueued = seen.get(stages.DECODE_ENQUEUED.name)
        return LOCAL if enqueued and not enqueued[0].c else UNKNOWN
    return UNKNOWN


def _attach_loose(requests: list[Request], loose: list[Event]) -> None:
    """Give each request the events that bear the other side's id: P's receipt of D's registration, orphans.

    Where an id was used twice, the last request that had begun by then is meant.
    """
    owners: dict[str, list[Request]] = defaultdict(list)
    if not loose:
        return
    for request in requests:
        names = {event.request for events in request.events.values() for event in events}
        names |= {event.ref for event in request.events.get(stages.MATCHED.name, ())}
        for name in names:
            owners[name].append(request)
    for event in loose:
        found = owners.get(event.request, [])
        begun = [request for request in found if request.first_ns <= event.t_ns]
        if found:
            owner = max(begun, key=lambda one: one.first_ns) if begun else found[0]
            owner.events.setdefault(event.stage, []).append(event)


def _transfers(request: Request, processes: Mapping[int, Process]) -> list[Transfer]:
    by_number: dict[tuple[int, int], Transfer] = {}
    for stage in legs.TRANSFER_STAGES:
        for event in request.events.get(stage, ()):
            transfer = by_number.setdefault((event.process, event.a), Transfer(event.process, event.a))
            _note(transfer, stage, event, processes)
    found = list(by_number.values())
    if request.mode == PUSH:
        # Several answers to one prompt share P's leg, and each is written to its own blocks.
        names = {event.request for event in request.events.get(stages.DECODE_ENQUEUED.name, ())}
        if names:
            found = [one for one in found if not one.remote_request or one.remote_request in names]
        _notify(request, found, processes)
    return sorted(found, key=lambda transfer: (transfer.post_started_ns, transfer.process, transfer.number))


def _notify(request: Request, transfers: list[Transfer], processes: Mapping[int, Process]) -> None:
    """Note when D was told of each write. Where each rank of P writes to its like on D, each has its own notification.

    Else nobody says whose was whose, and the last of as many as there are writes stands for all: what comes after is
    a duplicate.
    """
    notified = request.events.get(stages.NOTIFIED.name, [])
    width, wrote = (
        max((one.tp_size for one in processes.values() if one.engine == engine), default=1)
        for engine in (request.decode_engine, request.prefill_engine)
    )
    ranks = sorted({transfer.rank for transfer in transfers})
    # Between engines of one width a rank may lack its write; else every rank's is needed to tell that they are alike.
    alike = (
        width > 1
        and len(ranks) == len(transfers)
        and ranks == [r for r in range(width) if wrote != width or r in ranks]
    )
    for transfer in transfers:
        own = [event for event in notified if not alike or event.a == transfer.rank]
        expected = own[: 1 if alike else len(transfers)]
        transfer.notified_ns = expected[-1].t_ns if expected else 0
        transfer.remote_process = own[0].process if alike and own else 0


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
        transfer.failed, transfer.reason = True, event.ref
    else:
        if event.b:
            transfer.last_pending_ns = max(transfer.last_pending_ns, event.b + offset_ns)
        if stage == stages.TRANSFER_DONE.name:
            transfer.done_ns = event.t_ns
        else:
            transfer.probed_ns = event.t_ns
