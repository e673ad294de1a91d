"""Events to legs: one engine's work for one request, and the HTTP exchanges that asked for it.

An id names more than one leg where vLLM's random suffix is off: each arrival in the scheduler begins a new one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtrace import stages
from kvtrace.model import Event, Process
from kvtrace.modes import PUSH

PREFIXES = "cmpl|chatcmpl|resp|embd|score|rerank|pool|classify"
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_INDEX_SUFFIX = re.compile(r"-(\d+)\Z")
_PREFIX = re.compile(rf"^(?:{PREFIXES})-")
_CHILD = re.compile(rf"^[0-9]+_(?=(?:{PREFIXES})-)")
BEFORE_ID = rf"^([0-9]+_)?({PREFIXES})-"
"""What vLLM puts before an id, as a regular expression of SQL: what is left begins with each of `base_ids`."""
CLIENT = "client."
CANCELLED = "cancelled"  # the reason of a client that gave up on purpose
FRONT = (CLIENT, "router.")
_SEEN_IN_FRONT = (*FRONT, "prefill.http_", "decode.http_", stages.DECODE_FIRST_TOKEN_OUT.name)
_PREFILL_ONLY = frozenset((stages.SENDER_PICKED.name, stages.MATCHED.name))
# Of so many legs of one name the last ones may still be under way.
_LIVE = 32
_ENQUEUED = frozenset((stages.PREFILL_ENQUEUED.name, stages.DECODE_ENQUEUED.name))
# The other side's id stands on these, so that they belong to no leg of the engine that emits them.
_LOOSE = frozenset((stages.REGISTRATION_RECEIVED.name, stages.ORPHANED.name))
_OF_KEPT_BLOCKS = frozenset((stages.PREFILL_RELEASED.name, stages.LEASE_EXPIRED.name, stages.LEASE_EXTENDED.name))
TRANSFER_STAGES = (
    stages.PREPARED.name,
    stages.POST_STARTED.name,
    stages.POST_ENDED.name,
    stages.TRANSFER_DONE.name,
    stages.TRANSFER_FAILED.name,
    stages.PROBED.name,
)
"""The stages of one transfer, in their order: what a later one says of its size replaces what an earlier one said."""


def base_ids(engine_request: str, *, suffixed: bool = True) -> list[str]:
    """Return the ids a front end may have sent for this engine-side id, likeliest first.

    vLLM puts a prefix before the id, the prompt's index behind it (completions only), a random suffix behind that, and
    the answer's index before all of it where several are asked for. With `suffixed` False the suffix is likelier none.
    """
    whole = _CHILD.sub("", engine_request)
    stem = _PREFIX.sub("", whole)
    is_completion = whole.startswith("cmpl-")
    texts = [_RANDOM_SUFFIX.sub("", stem), stem]
    candidates = []
    for text in texts if suffixed else reversed(texts):
        if is_completion and _INDEX_SUFFIX.search(text):
            candidates.append(_INDEX_SUFFIX.sub("", text))
        candidates.append(text)
    return list(dict.fromkeys(candidates))


def stem(engine_request: str) -> str:
    """Return the part of an engine-side id that both legs of one prompt share: without child index and suffix."""
    return _RANDOM_SUFFIX.sub("", _CHILD.sub("", engine_request))


@dataclass(slots=True, eq=False)
class Leg:
    """One engine request on one engine: its id, the process that named it first, its side, its events in order."""

    name: str
    process: int
    side: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def first_ns(self) -> int:
        """Return when it is first seen, unix ns."""
        return self.events[0].t_ns

    def has(self, *wanted: stages.Stage) -> bool:
        """Return whether it has an event of any of these stages."""
        names = {stage.name for stage in wanted}
        return any(event.stage in names for event in self.events)

    def first(self, stage: stages.Stage) -> Event | None:
        """Return its first event of that stage, None if there is none."""
        return next((event for event in self.events if event.stage == stage.name), None)

    @property
    def refused_remote(self) -> str:
        """Return the id of P's leg that D's was sent, where D may have refused the request; else "".

        vLLM's server then adds a request to the engine that is aborted at once, so that P lets its blocks go.
        """
        enqueued = self.first(stages.DECODE_ENQUEUED)
        is_over = self.has(stages.DECODE_ABORTED) and not self.has(stages.DECODE_SCHEDULED)
        return enqueued.ref if enqueued is not None and is_over else ""


@dataclass(slots=True)
class Split:
    """A run's events: legs, front ends' events by id, and events that bear the other side's id."""

    legs: list[Leg]
    fronts: dict[str, list[Event]]
    loose: list[Event]


def split(events: Iterable[Event], processes: Mapping[int, Process]) -> Split:
    """Return the legs, front ends and loose events of a run; `events` are in time order."""
    by_key: dict[tuple[str, str], list[Leg]] = {}
    fronts: dict[str, list[Event]] = defaultdict(list)
    loose: list[Event] = []
    for event in events:
        if not event.request:
            continue
        if event.stage.startswith(_SEEN_IN_FRONT):
            fronts[event.request].append(event)
            continue
        if event.stage in _LOOSE:
            loose.append(event)
            continue
        process = processes.get(event.process)
        key = (process.engine if process is not None and process.engine else str(event.process), event.request)
        leg = _leg_of(event, by_key.setdefault(key, []))
        leg.events.append(event)
        side = event.stage.partition(".")[0]
        if side in ("prefill", "decode") and not leg.side:
            leg.side = side
    legs = [leg for found in by_key.values() for leg in found]
    for leg in legs:
        leg.side = leg.side or _side_by_transfer(leg.events)
    nameless = {number for number, process in processes.items() if process.imported and not process.engine}
    return Split(_merged(legs, nameless) if nameless else legs, fronts, loose)


def _side_by_transfer(events: list[Event]) -> str:
    """Return the side of a leg of which only its transfer is known: P's sender matches and writes."""
    for event in events:
        if event.stage in _PREFILL_ONLY or (event.stage == stages.TRANSFER_BEGUN.name and event.ref == PUSH):
            return "prefill"
    return "decode"


def _merged(legs: list[Leg], nameless: set[int]) -> list[Leg]:
    """Return the legs, those of one engine request put together although some log of it does not name its engine."""
    merged: list[Leg] = []
    homes: dict[tuple[str, str], Leg] = {}
    for leg in sorted(legs, key=lambda leg: leg.process in nameless):
        home = homes.setdefault((leg.name, leg.side), leg)
        if home is leg or leg.process not in nameless:
            merged.append(leg)
        else:
            home.events = sorted(home.events + leg.events)
    return merged


def _leg_of(event: Event, found: list[Leg]) -> Leg:
    """Return the leg of this id that the event belongs to; a second arrival begins a new one."""
    if not found:
        found.append(Leg(event.request, event.process))
    elif event.stage in _ENQUEUED:
        before = next((one for one in found[-1].events if one.stage in _ENQUEUED), None)
        if before is not None and before.t_ns != event.t_ns:
            found.append(Leg(event.request, event.process))
    elif len(found) > 1 and event.stage in _OF_KEPT_BLOCKS:
        # Blocks are let go in the order in which they were kept.
        lately = found[-_LIVE:]
        kept = (leg for leg in lately if leg.has(stages.PREFILL_FINISHED) and not leg.has(stages.PREFILL_RELEASED))
        return next(kept, found[-1])
    elif len(found) > 1 and event.stage in TRANSFER_STAGES:
        begun = (leg for leg in found[-_LIVE:] if any(_is_same_transfer(event, one) for one in leg.events))
        return next(begun, found[-1])
    return found[-1]


def _is_same_transfer(one: Event, other: Event) -> bool:
    return other.stage in TRANSFER_STAGES and (one.process, one.a) == (other.process, other.a)


def bases(legs: list[Leg], named: Iterable[str]) -> list[str]:
    """Return per leg the id that its front end was sent: one that a front end names, else the likeliest.

    A whole id that two engines share has no random suffix. D's leg for a request that it refused has an id of vLLM's
    making, and belongs where the id of P's leg that it was sent does.
    """
    known = set(named)
    shared = Counter(name for name, _ in {(leg.name, leg.side) for leg in legs})
    found = []
    for leg in legs:
        candidates = base_ids(leg.name, suffixed=shared[leg.name] < 2)
        found.append(next((one for one in candidates if one in known), candidates[0]))
    known.update(base for leg, base in zip(legs, found, strict=True) if leg.side == "prefill")
    for position, leg in enumerate(legs):
        if found[position] not in known and (remote := leg.refused_remote):
            found[position] = next((one for one in base_ids(remote) if one in known), found[position])
    return found


def remote_ids(base: str) -> tuple[str, str]:
    """Return the ids by which a router that does not wait for P's reply names P's leg to D: without P's suffix."""
    return f"cmpl-{base}-0", f"chatcmpl-{base}"


def exchanges(front: Iterable[Event]) -> dict[str, list[list[Event]]]:
    """Return the HTTP exchanges of one id per side, in time order; a new one begins with each `http_received`."""
    found: dict[str, list[list[Event]]] = {"prefill": [], "decode": []}
    for event in front:
        side = event.stage.partition(".")[0]
        if side not in found:
            continue
        if event.stage.endswith("http_received") or not found[side]:
            found[side].append([])
        found[side][-1].append(event)
    return found
