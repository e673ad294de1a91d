"""OTLP as JSON, as OpenTelemetry's file exporter writes it: one line a request, each a whole TracesData message.

Ids are hexadecimal, 64-bit integers are strings, enumerations are numbers: the protocol's own JSON mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvtrace import __version__
from kvtrace.exporters import names
from kvtrace.exporters.names import own

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import BinaryIO

    from kvtrace.exporters.spans import Span, Value

SCOPE = "kvtrace"
_SAMPLED = 1
_STATUS_ERROR = 2

_encoder = msgspec.json.Encoder()


def write(requests: Iterable[list[Span]], out: BinaryIO, resource: Mapping[str, str]) -> int:
    """Write one line per request and return how many; `resource` are attributes of every resource."""
    count = 0
    for spans in requests:
        out.write(_encoder.encode(document(spans, resource)))
        out.write(b"\n")
        count += 1
    return count


def resource_of(span: Span, resource: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of the service that a span belongs to."""
    found = {names.SERVICE_NAME: f"kvtrace-{span.service}", names.SERVICE_NAMESPACE: "kvtrace"}
    if span.instance:
        found[names.SERVICE_INSTANCE] = span.instance
    return {**resource, **found, names.SERVICE_VERSION: __version__}


def document(spans: list[Span], resource: Mapping[str, str]) -> dict[str, Any]:
    """Return a TracesData message of one request's spans, grouped by service."""
    by_service: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        by_service.setdefault((span.service, span.instance), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(dict(resource_of(group[0], resource)))},
                "scopeSpans": [
                    {"scope": {"name": SCOPE, "version": __version__}, "spans": [_span(span) for span in group]}
                ],
            }
            for group in by_service.values()
        ]
    }


def _span(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "parentSpanId": f"{span.parent_id:016x}" if span.parent_id else "",
        "flags": _SAMPLED if span.sampled else 0,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "events": [{"timeUnixNano": str(t_ns), "name": name} for t_ns, name in span.points],
        "links": [
            {
                "traceId": f"{span.trace_id:032x}",
                "spanId": f"{link.span_id:016x}",
                "attributes": _attributes({own("link"): link.reason}),
            }
            for link in span.links
        ],
    }
    found["status"] = {"code": _STATUS_ERROR, "message": span.error} if span.error else {}
    return found


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": value}
