"""What holds between two processes: whether they share a clock, and the least time a message between them took."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from kvtrace import stages
from kvtrace.model import Awake, Event, Process, Request, Transfer


def crosses_hosts(first: int, second: int, processes: Mapping[int, Process]) -> bool:
    """Return whether the two processes are on different clocks, so that time between them rests on wall anchors."""
    one, other = processes.get(first), processes.get(second)
    return one is not None and other is not None and one.domain != other.domain


def least_message_ns(
    requests: Iterable[Request], senders: Mapping[int, list[Awake]] | None = None
) -> dict[tuple[str, str], int]:
    """Return per (D engine, P engine) the least time seen from sending a registration to reading it, in ns.

    A registration that was read by a thread that had slept since before it was sent tells how long the thread slept,
    not how long the message took, and is left out; without any other the least time is 0. Wall clocks of two hosts may
    make a time negative; it is then 0, since no message arrives before it is sent.
    """
    least: dict[tuple[str, str], int] = {}
    for request in requests:
        sent = request.events.get(stages.REGISTRATION_SENT.name)
        received = request.events.get(stages.REGISTRATION_RECEIVED.name)
        if not sent or not received or _slept_through(sent[-1].t_ns, received[-1], senders or {}):
            continue
        taken_ns = max(0, received[-1].t_ns - sent[-1].t_ns)
        key = (request.decode_engine, request.prefill_engine)
        least[key] = min(taken_ns, least.get(key, taken_ns))
    return least


def _slept_through(sent_ns: int, received: Event, senders: Mapping[int, list[Awake]]) -> bool:
    awake = senders.get(received.process, [])
    position = bisect_right(awake, received.t_ns, key=lambda stretch: stretch.start_ns) - 1
    return position >= 0 and awake[position].start_ns > sent_ns


def fastest_ns(requests: Iterable[Request]) -> dict[tuple[str, str, int], int]:
    """Return per (P engine, D engine, size class) the least time from posting to the first sign of completion, in ns.

    A size class is a power of two of bytes. Only completions seen by either side count.
    """
    fastest: dict[tuple[str, str, int], int] = {}
    for request in requests:
        for transfer in request.transfers:
            seen_ns = completion_ns(transfer)
            if not seen_ns or not transfer.post_started_ns or transfer.failed:
                continue
            key = (request.prefill_engine, request.decode_engine, transfer.moved_bytes.bit_length())
            taken_ns = max(0, seen_ns - transfer.post_started_ns)
            fastest[key] = min(taken_ns, fastest.get(key, taken_ns))
    return fastest


def completion_ns(transfer: Transfer) -> int:
    """Return the earliest sign that the transfer was complete, unix ns; 0 if nobody saw one."""
    signs = [t for t in (transfer.done_ns, transfer.notified_ns, transfer.probed_ns) if t]
    if transfer.done_at_post and transfer.post_ended_ns:
        signs.append(transfer.post_ended_ns)
    return min(signs, default=0)
