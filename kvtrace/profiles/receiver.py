"""A receiver of profiles on loopback, for recordings without a Pyroscope server: what is pushed becomes files."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

from kvtrace.errors import SourceError, StoreError
from kvtrace.profiles.folder import Keeper

if TYPE_CHECKING:
    from pathlib import Path

PATH = "/push.v1.PusherService/Push"
_BODY_BYTES_MOST = 32 * 1024 * 1024
_HOST = "127.0.0.1"
# No page in a browser can send these to another address than its own.
_TYPES = ("application/proto", "application/protobuf", "application/x-protobuf")


class Receiver:
    """Takes what processes of this machine push and keeps it in a folder. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Listen on a free port. Raises StoreError where the folder cannot be written to."""
        try:
            self._keeper = Keeper(folder)
        except OSError as error:
            raise StoreError(
                f"profiles cannot be kept in {folder}: {error.strerror}; name another folder with --profile-dir"
            ) from error
        self.failure = ""
        self._server = ThreadingHTTPServer((_HOST, 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="kvtrace-profiles")

    @property
    def url(self) -> str:
        """Return the address to push to."""
        return f"http://{_HOST}:{self._server.server_address[1]}"

    @property
    def kept(self) -> int:
        """Return how many profiles have been kept."""
        return self._keeper.kept

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> tuple[int, str]:
        """Return the status and the text of the answer to one push."""
        try:
            self._keeper.keep(body)
        except SourceError as error:
            return self._refuse(400, str(error))
        except OSError as error:
            return self._refuse(507, error.strerror or str(error))
        return 200, "{}"

    def _refuse(self, status: int, message: str) -> tuple[int, str]:
        self.failure = self.failure or message
        return status, message

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            """One connection."""

            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                """Take one push."""
                length = self.headers.get("Content-Length", "")
                refusal = 404 if self.path != PATH else 415 if self.headers.get("Content-Type") not in _TYPES else 0
                if not length.isdecimal() or int(length) > _BODY_BYTES_MOST:
                    refusal = refusal or 413
                if refusal:
                    self.close_connection = True
                    self._answer(refusal, "this takes pushes of Pyroscope's profiles")
                    return
                self._answer(*receiver._take(self.rfile.read(int(length))))

            def _answer(self, status: int, text: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_arguments: object) -> None:
                """Say nothing: what goes wrong is said once, at the end."""

        return Handler
