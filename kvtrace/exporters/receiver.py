"""An OTLP receiver: its address, the exporter that reaches it, and what it answers beside yes and no.

OpenTelemetry's exporters take a redirection for success and do not look at how many spans an answer says were rejected.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtrace.errors import ExportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace.export import SpanExporter

    Rejected = Callable[[int, str], None]

GRPC_PORT = 4317
_REDIRECTIONS = range(300, 400)


def exporter(endpoint: str, timeout_s: float, rejected: Rejected) -> SpanExporter:
    """Return the exporter for an endpoint; headers and certificates come from OpenTelemetry's own variables.

    `rejected` is called within `export` when a receiver took a message and rejected some of its spans: how many, and
    its reason. Raises ExportError where the exporter is not installed, UsageError for an impossible endpoint.
    """
    protocol, url, insecure = split_endpoint(endpoint)
    try:
        if protocol == "grpc":
            return _over_grpc(url, insecure, timeout_s, rejected)
        return _over_http(url, timeout_s, rejected)
    except ImportError as error:
        message = f"sending spans needs a package that is missing ({error.name}): pip install 'kvtrace[otlp]'"
        raise ExportError(message) from error


def _over_grpc(url: str, insecure: bool, timeout_s: float, rejected: Rejected) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    class Exporter(OTLPSpanExporter):
        """Listens to what the receiver answers: the exporter's own method drops it, and no public hook sees it."""

        def _initialize_channel_and_stub(self) -> None:
            super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
            self._client = _Listening(self._client, rejected)  # type: ignore[assignment]

    return Exporter(endpoint=url, insecure=insecure, timeout=timeout_s)


class _Listening:
    """A client of the trace service that passes on what answers say of rejected spans."""

    def __init__(self, client: Any, rejected: Rejected) -> None:
        self._client = client
        self._rejected = rejected

    def Export(self, **given: Any) -> Any:  # noqa: N802 -- the protocol's name
        """Export as the client does."""
        answer = self._client.Export(**given)
        _tell(answer, self._rejected)
        return answer


def _over_http(url: str, timeout_s: float, rejected: Rejected) -> SpanExporter:
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    def look(answer: requests.Response, *_arguments: Any, **_options: Any) -> None:
        if answer.status_code in _REDIRECTIONS:
            elsewhere = answer.headers.get("location") or "nowhere"
            raise ExportError(f"it answers {answer.status_code} and points to {elsewhere}: name that address instead")
        with contextlib.suppress(Exception):  # of an answer that is none of the protocol's the status says enough
            _tell(ExportTraceServiceResponse.FromString(answer.content), rejected)

    if any(name.startswith("OTEL_") and name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        return OTLPSpanExporter(endpoint=url, timeout=timeout_s)  # it brings a session of its own
    session = requests.Session()
    session.hooks["response"].append(look)
    return OTLPSpanExporter(endpoint=url, timeout=timeout_s, session=session)


def _tell(answer: Any, rejected: Rejected) -> None:
    partial = answer.partial_success
    if partial.rejected_spans > 0:
        rejected(partial.rejected_spans, partial.error_message or "no reason given")


def split_endpoint(endpoint: str) -> tuple[str, str, bool]:
    """Return the protocol (grpc or http), the address for its exporter, and whether it goes unencrypted.

    grpc:// and grpcs:// are gRPC, and so are http:// and https:// with port 4317 and no path; all else is HTTP, at
    /v1/traces where no path is given. Raises UsageError for what is no such address.
    """
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise UsageError(_no_endpoint(endpoint)) from error
    if parts.scheme not in {"grpc", "grpcs", "http", "https"} or not parts.hostname:
        raise UsageError(_no_endpoint(endpoint))
    is_plain = parts.scheme in {"grpc", "http"}
    if parts.scheme.startswith("grpc") or (port == GRPC_PORT and parts.path in {"", "/"}):
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return "grpc", f"{host}:{port or GRPC_PORT}", is_plain
    path = parts.path if parts.path not in {"", "/"} else "/v1/traces"
    return "http", parts._replace(path=path).geturl(), is_plain


def _no_endpoint(endpoint: str) -> str:
    return f"{endpoint!r} is no OTLP endpoint: use grpc://HOST:4317 or http://HOST:4318"
