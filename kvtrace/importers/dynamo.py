"""Dynamo's request trace (`dynamo.request.trace.v1`): one record per request, durations as Dynamo's router saw them.

When KV is handed over, `ttft_ms` ends with P's first token and `kv_transfer_estimated_latency_ms` runs from there to
D's. What passed between two points, computing or waiting, the record does not tell: it stays unattributed.
"""

from __future__ import annotations

import msgspec

from kvtrace import stages
from kvtrace.importers.identity import Attempt, Known, own_name
from kvtrace.importers.points import Imported, Part, Placed
from kvtrace.importers.source import Source, printable
from kvtrace.wording import plural

NAME = "dynamo"
SCHEMA = "dynamo.request.trace.v1"
PART = "router"
_REQUEST_END = "request_end"
_MS_NS = 1_000_000


class _Worker(msgspec.Struct):
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None


class _Request(msgspec.Struct):
    request_id: str
    x_request_id: str | None = None
    request_received_ms: int | None = None
    prefill_wait_time_ms: float | None = None
    ttft_ms: float | None = None
    total_time_ms: float | None = None
    kv_transfer_estimated_latency_ms: float | None = None
    worker: _Worker | None = None


class _Event(msgspec.Struct):
    schema: str = ""
    event_type: str = ""
    request: _Request | None = None


class _Line(_Event):
    event: _Event | None = None


def recognise(head: bytes) -> bool:
    """Return whether a file that begins so is a request trace of Dynamo's."""
    return SCHEMA.encode() in head


def read(source: Source, known: Known) -> Imported:
    """Return a file's points and add its requests to those known."""
    placed = Imported(source, NAME, 0, parts={PART: Part({"kind": "router"})})
    passed_over = timeless = 0
    for line, text in source.lines():
        outer = source.decode(line, text, _Line)
        event = outer.event or outer
        if event.schema != SCHEMA:
            raise source.fault(line, f"its schema is not {SCHEMA}")
        if event.event_type != _REQUEST_END:
            passed_over += 1
            continue
        if event.request is None:
            raise source.fault(line, f"is a {_REQUEST_END} without a request")
        placed.records += 1
        if event.request.request_received_ms is None:
            timeless += 1
            continue
        _place(source, line, event.request, placed, known)
    if passed_over:
        placed.said.append(f"{plural(passed_over, 'record')} of tools or payloads passed over unread")
    if timeless:
        whole = plural(placed.records, "record")
        placed.said.append(f"{timeless} of {whole} gave no time of arrival and could not be placed")
    placed.said.append("tells the hops that its router saw and not what passed within them; begins to the millisecond")
    return placed


def _place(source: Source, line: int, request: _Request, placed: Imported, known: Known) -> None:
    name = own_name(request.request_id)
    if not name:
        raise source.fault(line, "has an empty request_id")
    client_id = printable(request.x_request_id or "")
    received_ns = source.time_ns(line, "request_received_ms", (request.request_received_ms or 0) * _MS_NS)

    def after_ns(what: str, *durations_ms: float) -> int:
        return received_ns + sum(source.duration_ns(line, what, duration_ms, _MS_NS) for duration_ms in durations_ms)

    placed.joined += name in known.names
    points = [Placed(received_ns, stages.ROUTER_RECEIVED, name, PART, client_id)]
    first_token_ns = done_ns = None
    if request.total_time_ms is not None:
        done_ns = after_ns("total_time_ms", request.total_time_ms)
        points.append(Placed(done_ns, stages.ROUTER_DONE, name, PART))
    ttft_ms, transfer_ms = request.ttft_ms, request.kv_transfer_estimated_latency_ms
    if _is_handed_over(request):
        if request.prefill_wait_time_ms is not None:
            sent_ns = after_ns("prefill_wait_time_ms", request.prefill_wait_time_ms)
            points.append(Placed(sent_ns, stages.ROUTER_PREFILL_SENT, name, PART))
        if ttft_ms is not None:
            points.append(Placed(after_ns("ttft_ms", ttft_ms), stages.ROUTER_PREFILL_RETURNED, name, PART))
        if ttft_ms is not None and transfer_ms is not None:
            first_token_ns = after_ns("kv_transfer_estimated_latency_ms", ttft_ms, transfer_ms)
    elif ttft_ms is not None:
        first_token_ns = after_ns("ttft_ms", ttft_ms)
    if first_token_ns is not None:
        if done_ns is not None:
            first_token_ns = source.within(line, first_token_ns, done_ns)
        points.append(Placed(first_token_ns, stages.ROUTER_FIRST_TOKEN, name, PART))
    placed.points += points
    known.attempt(client_id or name, Attempt(name, received_ns, 0, first_token_ns is not None))


def _is_handed_over(request: _Request) -> bool:
    """Return whether another worker than the one that computed the prompt answered, as far as the record tells."""
    if request.kv_transfer_estimated_latency_ms is not None:
        return True
    worker = request.worker
    return (
        worker is not None
        and worker.prefill_worker_id is not None
        and worker.decode_worker_id is not None
        and worker.prefill_worker_id != worker.decode_worker_id
    )
