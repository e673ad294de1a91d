"""Our spans as spans of OpenTelemetry's SDK, with our ids and our times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context

from kvtrace import __version__
from kvtrace.exporters.names import own
from kvtrace.exporters.otlp_json import SCOPE, resource_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider

    from kvtrace.exporters.spans import Span

_PROVIDERS_MAX = 256
_KINDS = {1: trace.SpanKind.INTERNAL, 2: trace.SpanKind.SERVER, 3: trace.SpanKind.CLIENT}


class Translation:
    """Makes spans of the SDK that have our ids and our times; one provider per service, none of them global."""

    def __init__(self) -> None:
        self._providers: dict[tuple[tuple[str, str], ...], TracerProvider] = {}
        self._made: list[ReadableSpan] = []
        self._ids, self._processor, self._provide = _parts(self._made.append)

    def of(self, spans: list[Span], resource: Mapping[str, str]) -> list[ReadableSpan]:
        """Return the spans as the SDK's own."""
        for span in spans:
            self._make(span, resource)
        made = list(self._made)
        self._made.clear()
        return made

    def _make(self, span: Span, resource: Mapping[str, str]) -> None:
        attributes = tuple(sorted(resource_of(span, resource).items()))
        provider = self._providers.get(attributes)
        if provider is None:
            if len(self._providers) >= _PROVIDERS_MAX:  # engines come and go in a long recording
                self._providers.clear()
            provider = self._providers[attributes] = self._provide(dict(attributes))
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        context = Context()
        if span.parent_id:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_context(span, span.parent_id)), context)
        made = provider.get_tracer(SCOPE, __version__).start_span(
            span.name,
            context,
            _KINDS[span.kind],
            dict(span.attributes),
            [trace.Link(_context(span, link.span_id), {own("link"): link.reason}) for link in span.links],
            span.start_ns,
        )
        for t_ns, name in span.points:
            made.add_event(name, timestamp=t_ns)
        if span.error:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        made.end(span.end_ns)


def _context(span: Span, span_id: int) -> trace.SpanContext:
    return trace.SpanContext(
        span.trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
    )


def _parts(keep: Callable[[ReadableSpan], None]) -> tuple[Any, Any, Callable[[dict[str, str]], TracerProvider]]:
    """Return a source of given ids, a processor that keeps what ends, and what makes a provider of both."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider, sampling
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Given(IdGenerator):
        """Ids that were decided elsewhere."""

        trace_id = span_id = 1

        def generate_trace_id(self) -> int:
            return self.trace_id

        def generate_span_id(self) -> int:
            return self.span_id

    class Kept(SpanProcessor):
        """Passes on every span that ends."""

        def on_end(self, span: ReadableSpan) -> None:
            keep(span)

    ids, kept = Given(), Kept()

    def provide(attributes: dict[str, str]) -> TracerProvider:
        provider = TracerProvider(
            sampler=sampling.ALWAYS_ON,
            resource=Resource(attributes),
            shutdown_on_exit=False,
            id_generator=ids,
            span_limits=_limits(SpanLimits),
        )
        provider.add_span_processor(kept)
        return provider

    return ids, kept, provide


def _limits(limits: type[SpanLimits]) -> SpanLimits:
    """Return no limits: a request's segments, links and points are few and belong together."""
    none = limits.UNSET
    return limits(
        max_attributes=none, max_span_attributes=none, max_event_attributes=none, max_link_attributes=none,
        max_events=none, max_links=none, max_attribute_length=none, max_span_attribute_length=none,
    )  # fmt: skip
