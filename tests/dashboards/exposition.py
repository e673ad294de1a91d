"""A stand-in for the exporter: every metric of `kvtrace.metrics.names`, with values that grow, as Prometheus text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvtrace.metrics import names
from kvtrace.palette import CLASS_COLOUR

VALUES = {
    "run": ("run.duckdb",),
    "model": ("tiny",),
    "connector": ("NixlPushConnector",),
    "mode": ("push",),
    "scope": ("router",),
    "verdict": ("complete", "failed", "aborted"),
    "prefill": ("p0",),
    "decode": ("d0",),
    "class": tuple(CLASS_COLOUR),
    "cause": ("prefill.forward", "wire"),
    "engine": ("p0", "d0"),
    "outcome": ("done", "failed", "in_time", "late"),
    "kind": ("core",),
    "state": ("recording",),
}


def text(age_s: float) -> str:
    """Return the exposition as it stands `age_s` after its start: one observation of 0.1 a second in each histogram."""
    lines = []
    for metric in names.METRICS:
        lines += [f"# HELP {metric.name} {metric.doc}", f"# TYPE {metric.name} {metric.kind.value}"]
        for labels in _combinations((*names.COMMON, *metric.labels)):
            if metric.kind is names.Kind.HISTOGRAM:
                bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
                for bound in bounds:
                    count = age_s if bound == "+Inf" or float(bound) >= 0.1 else 0.0
                    lines.append(f'{metric.name}_bucket{{{labels},le="{bound}"}} {count:.3f}')
                lines.append(f"{metric.name}_sum{{{labels}}} {0.1 * age_s:.3f}")
                lines.append(f"{metric.name}_count{{{labels}}} {age_s:.3f}")
            else:
                lines.append(f"{metric.name}{{{labels}}} {age_s if metric.kind is names.Kind.COUNTER else 1.0:.3f}")
    return "\n".join(lines) + "\n"


def _combinations(labels: tuple[str, ...]) -> Iterator[str]:
    if not labels:
        yield ""
        return
    first, *rest = labels
    for value in VALUES[first]:
        for others in _combinations(tuple(rest)):
            yield f'{first}="{value}"' + (f",{others}" if others else "")


@contextmanager
def exposed() -> Iterator[int]:
    """Serve the exposition on loopback until the block ends and yield its port."""
    began_s = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text(time.monotonic() - began_s).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
