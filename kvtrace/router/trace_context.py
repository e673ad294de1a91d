"""W3C trace context: carried through where the client sent a valid one, started where it did not."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvtrace.router.headers import Headers, values

SPANS_VARIABLE = "KVTRACE_SPANS"
"""Set to 1 where the recording's spans are exported: the legs then hang below the router's own span."""

_FIELDS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Carried:
    """What both legs are sent, and the request's place in the trace; `own_span` is 0 if they get the client's."""

    legs: dict[str, str]
    trace_id: int
    parent_span: int
    own_span: int
    flags: int

    def again(self) -> Carried:
        """Return the context of another attempt: the same trace, a span of its own where the first had one."""
        if not self.own_span:
            return self
        own_span = _span_id()
        traceparent = f"00-{self.trace_id:032x}-{own_span:016x}-{self.flags:02x}"
        return replace(self, own_span=own_span, legs={**self.legs, "traceparent": traceparent})


def carried(headers: Headers) -> Carried:
    """Return the trace context for both legs; a new, sampled trace if the client sent no valid one.

    A client's own span stays the parent of the engines' spans unless SPANS_VARIABLE says that the router's span, which
    then is one between them, will be exported.
    """
    sent = {field: [value.decode("latin-1") for value in values(headers, field.encode())] for field in _FIELDS}
    context = _PROPAGATOR.extract({field: value for field, value in sent.items() if value}, Context())
    client = trace.get_current_span(context).get_span_context()
    parent_span = client.span_id if client.is_valid else 0
    if not client.is_valid or os.environ.get(SPANS_VARIABLE) == "1":
        context = trace.set_span_in_context(trace.NonRecordingSpan(_below(client)), Context())
    given = trace.get_current_span(context).get_span_context()
    legs: dict[str, str] = {}
    _PROPAGATOR.inject(legs, context)
    own_span = given.span_id if given.span_id != parent_span else 0
    return Carried(legs, given.trace_id, parent_span, own_span, int(given.trace_flags))


def _below(client: trace.SpanContext) -> trace.SpanContext:
    """Return the context of a span of the router's own, in the client's trace where it sent one."""
    return trace.SpanContext(
        trace_id=client.trace_id if client.is_valid else 1 + secrets.randbelow((1 << 128) - 1),
        span_id=_span_id(),
        is_remote=False,
        trace_flags=client.trace_flags if client.is_valid else trace.TraceFlags(trace.TraceFlags.SAMPLED),
        trace_state=client.trace_state,
    )


def _span_id() -> int:
    return 1 + secrets.randbelow((1 << 64) - 1)
