"""Events to legs: what happened to one engine request on one engine, and what its front ends saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvtrace import stages
from kvtrace.model import Event, Process

CLIENT = "client."
CANCELLED = "cancelled"  # the reason of a client that gave up on purpose
FRONT = (CLIENT, "router.")
_HTTP = ("prefill.http_", "decode.http_", stages.DECODE_FIRST_TOKEN_OUT.name)
_SEEN_IN_FRONT = (*FRONT, *_HTTP)
_PREFILL_ONLY = frozenset((stages.SENDER_PICKED.name, stages.MATCHED.name))
PUSH = "push"

Legs = dict[tuple[str, str], "Leg"]


class Leg:
    """One engine request on one engine: its id, the first process that told of it, its events, prefill or decode."""

    __slots__ = ("engine", "events", "name", "side")

    def __init__(self, name: str, engine: int) -> None:
        self.name = name
        self.engine = engine
        self.events: list[Event] = []
        self.side = ""


def split(
    events: Iterable[Event], processes: Mapping[int, Process]
) -> tuple[Legs, dict[str, list[Event]], list[Event]]:
    """Return the legs by (engine, id), what front ends saw by id, and events that bear the other side's id.

    `events` are in time order, and so are those of each leg.
    """
    legs: Legs = {}
    fronts: dict[str, list[Event]] = defaultdict(list)
    loose: list[Event] = []
    for event in events:
        if not event.request:
            continue
        if event.stage.startswith(_SEEN_IN_FRONT):
            fronts[event.request].append(event)
            continue
        if event.stage in (stages.REGISTRATION_RECEIVED.name, stages.ORPHANED.name):
            loose.append(event)
            continue
        side = event.stage.partition(".")[0]
        process = processes.get(event.process)
        key = (process.engine if process is not None and process.engine else str(event.process), event.request)
        leg = legs.get(key)
        if leg is None:
            leg = legs[key] = Leg(event.request, event.process)
        leg.events.append(event)
        if side in ("prefill", "decode") and not leg.side:
            leg.side = side
    for leg in legs.values():
        leg.side = leg.side or _side_by_transfer(leg.events)
    nameless = {number for number, process in processes.items() if process.imported and not process.engine}
    return (_merged(legs, nameless) if nameless else legs), fronts, loose


def _side_by_transfer(events: list[Event]) -> str:
    """Return the side of a leg of which only its transfer is known: P's sender matches and writes."""
    for event in events:
        if event.stage in _PREFILL_ONLY or (event.stage == stages.TRANSFER_BEGUN.name and event.ref == PUSH):
            return "prefill"
    return "decode"


def _merged(legs: Legs, nameless: set[int]) -> Legs:
    """Return the legs, those of one engine request put together although some log of it does not name its engine."""
    merged: Legs = {}
    homes: dict[tuple[str, str], Leg] = {}
    for key, leg in sorted(legs.items(), key=lambda item: item[1].engine in nameless):
        home = homes.setdefault((leg.name, leg.side), leg)
        if home is leg or leg.engine not in nameless:
            merged[key] = leg
        else:
            home.events = sorted(home.events + leg.events)
    return merged
