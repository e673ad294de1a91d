"""W3C trace context: carried through where the client sent a valid one, started where it did not."""

from __future__ import annotations

import secrets

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvtrace.router.headers import Headers, values

_FIELDS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()


def carried(headers: Headers) -> dict[str, str]:
    """Return the traceparent and tracestate for both legs; a new, sampled trace if the client sent no valid one."""
    sent = {field: [value.decode("latin-1") for value in values(headers, field.encode())] for field in _FIELDS}
    context = _PROPAGATOR.extract({field: value for field, value in sent.items() if value}, Context())
    if not trace.get_current_span(context).get_span_context().is_valid:
        context = trace.set_span_in_context(trace.NonRecordingSpan(_started()), Context())
    legs: dict[str, str] = {}
    _PROPAGATOR.inject(legs, context)
    return legs


def _started() -> trace.SpanContext:
    return trace.SpanContext(
        trace_id=1 + secrets.randbelow((1 << 128) - 1),
        span_id=1 + secrets.randbelow((1 << 64) - 1),
        is_remote=False,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
