"""Retries: which requests are further attempts at one that was lost, and what the lost ones cost before.

A client's id may repeat, also at the same time, so an id alone makes no retry: the earlier request must have ended
without an answer, and the later one begun after that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from kvtrace import stages
from kvtrace.model import Lost, Request

# A client that comes back later than this asks anew.
RETRY_NS = 60_000_000_000
# An id that so many bear names a client, not a request.
CROWD = 32
_FORGET_NS = 600_000_000_000
_ANSWERED = (stages.ROUTER_FIRST_TOKEN, stages.ROUTER_DONE, stages.DECODE_FIRST_TOKEN_OUT, stages.DECODE_FINISHED)
_OVER = (
    stages.ROUTER_FAILED, stages.ROUTER_CANCELLED, stages.DECODE_ABORTED, stages.PREFILL_ABORTED,
    stages.DECODE_HTTP_DISCONNECTED, stages.PREFILL_HTTP_DISCONNECTED, stages.DECODE_HTTP_DONE,
)  # fmt: skip
_PREFILL_OVER = (stages.PREFILL_HTTP_DONE, stages.PREFILL_HTTP_RESPONDED, stages.PREFILL_FINISHED)


def number(requests: Iterable[Request]) -> None:
    """Note with each request its lost earlier attempts, and which attempt it is."""
    alike: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        alike[request.client_request_id or request.base_id].append(request)
    for same in alike.values():
        if 1 < len(same) <= CROWD:
            _number(same)


def _number(same: list[Request]) -> None:
    """Note attempts among the requests under one id. An answer ends the chain: what comes later asks anew."""
    sharing = Counter(request.base_id for request in same)
    begun = sorted(((_start_ns(one, whole=sharing[one.base_id] < 2), one) for one in same), key=lambda pair: pair[0])
    open_: list[tuple[int, Request]] = []
    for start_ns, request in begun:
        lost = []
        for began_ns, earlier in open_:
            over_ns = _over_ns(earlier, request)
            if over_ns is not None and start_ns - RETRY_NS <= over_ns <= start_ns:
                lost.append(Lost(earlier.request_id, began_ns, start_ns))
        request.lost = tuple(lost)
        request.attempt = max(request.attempt, len(lost))
        if any(stage.name in request.events for stage in _ANSWERED):
            open_.clear()
        else:
            open_ = [(began_ns, one) for began_ns, one in open_ if began_ns >= start_ns - _FORGET_NS]
            open_.append((start_ns, request))


def _over_ns(request: Request, later: Request) -> int | None:
    """Return when the request had ended without an answer, unix ns; None if it may still be answered."""
    ends: tuple[stages.Stage, ...] = _OVER
    if request.base_id == later.base_id and not request.decode_engine and later.decode_engine:
        # Another leg on P took its place under the same id, so nobody came for this one.
        ends += _PREFILL_OVER
    return min((request.events[stage.name][0].t_ns for stage in ends if stage.name in request.events), default=None)


def _start_ns(request: Request, *, whole: bool) -> int:
    """Return when the attempt began; the router's points are its own only where no other attempt bears its id."""
    own = [
        events[0].t_ns for stage, events in request.events.items() if whole or not stage.startswith("router.")
    ]  # fmt: skip
    return min(own, default=0)
