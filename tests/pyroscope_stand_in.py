"""A stand-in for a Pyroscope server, which cannot be had here: it takes pushes and remembers their samples, no more."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvtrace.profiles.messages import Profile, PushRequest


@dataclass(frozen=True)
class Sample:
    """One sample as it came: labels of its series and its own, function names innermost first, seconds."""

    series: dict[str, str]
    labels: dict[str, str]
    stack: tuple[str, ...]
    seconds: float


@dataclass
class StandIn:
    """What was pushed so far."""

    url: str
    pushes: list[bytes] = field(default_factory=list)

    def samples(self, first: int = 0) -> list[Sample]:
        """Return every sample that was pushed, from one push on."""
        return [sample for body in self.pushes[first:] for sample in samples(body)]


def samples(body: bytes) -> Iterator[Sample]:
    """Yield the samples of one push."""
    for series in PushRequest.FromString(gzip.decompress(body)).series:
        names = {pair.name: pair.value for pair in series.labels}
        for raw in series.samples:
            profile = Profile.FromString(raw.rawProfile)
            strings = profile.string_table
            functions = {each.id: strings[each.name] for each in profile.function}
            frames = {each.id: [functions[line.function_id] for line in each.line] for each in profile.location}
            for sample in profile.sample:
                stack = tuple(name for identity in sample.location_id for name in frames[identity])
                labels = {strings[each.key]: strings[each.str] for each in sample.label}
                yield Sample(names, labels, stack, sample.value[0] / 1e9)


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Run a stand-in on a free port of loopback."""
    found = StandIn("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/push.v1.PusherService/Push"
            found.pushes.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def black_hole() -> Iterator[str]:
    """Listen where everybody can connect and nobody is ever answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
