"""A real OTLP receiver on loopback: the protocol's own service over gRPC, and its HTTP endpoint with protobuf."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


@dataclass
class Received:
    """What a receiver got."""

    endpoint: str = ""
    resource_spans: list[ResourceSpans] = field(default_factory=list)

    def services(self) -> list[tuple[str, Span]]:
        """Return every span with the name of its service."""
        return [
            (values(group.resource.attributes)["service.name"], span)
            for group in self.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def spans(self) -> list[Span]:
        """Return every span."""
        return [span for _, span in self.services()]


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes of the protocol as plain values."""
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _answer(rejects: int) -> Any:
    answer = trace_service_pb2.ExportTraceServiceResponse()
    if rejects:
        answer.partial_success.rejected_spans = rejects
        answer.partial_success.error_message = "not <b>today</b>"
    return answer


@contextlib.contextmanager
def over_grpc(rejects: int = 0) -> Iterator[Received]:
    """Serve OTLP over gRPC; of every message so many spans are called rejected."""
    received = Received()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the protocol's name
            received.resource_spans.extend(request.resource_spans)
            return _answer(rejects)

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    received.endpoint = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait(10)


@contextlib.contextmanager
def over_http(rejects: int = 0, status: int = 200) -> Iterator[Received]:
    """Serve OTLP over HTTP; of every message so many spans are called rejected, or it is sent elsewhere."""
    received = Received()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            received.resource_spans.extend(request.resource_spans)
            answer = _answer(rejects).SerializeToString()
            self.send_response(status)
            if status != 200:
                self.send_header("location", "https://elsewhere.example/v1/traces")
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


RECEIVERS = {"grpc": over_grpc, "http": over_http}
