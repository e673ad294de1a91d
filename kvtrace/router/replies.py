"""Answering the client over ASGI: whole replies, streams as they come, errors in OpenAI's shape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Receive, Send

    from kvtrace.router.headers import Headers

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError", 413: "RequestTooLargeError"}


class Refusal(Exception):  # noqa: N818 -- a reply, not a fault
    """A whole reply that ends the request without an answer: the router's own, or an engine's passed on."""

    def __init__(self, reason: str, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.headers = headers
        self.body = body

    @classmethod
    def own(cls, status: int, message: str, code: str) -> Refusal:
        """Return one of the router's own, as a JSON error in OpenAI's shape."""
        kind = _KINDS.get(status, "BadGatewayError" if status == 502 else "ServiceUnavailableError")
        return cls(message, status, *json_body({"error": _error(message, kind, code)}))


def _error(message: str, kind: str, code: str) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": None, "code": code}


def json_body(content: object) -> tuple[Headers, bytes]:
    """Return the headers and the body of a JSON reply."""
    body = json.dumps(content).encode()
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body


class ClientReply:
    """The reply to one client: begun once, written as fast as the client reads, ended once."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """HTTP status, 0 before the reply has begun."""
        self.ended = False
        """True once the end is on its way: a client's leaving no longer cancels anything."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head."""
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body; returns when the client's connection can take more."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """Send the end of the body."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send head and body together."""
        await self.start(status, headers)
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})


class ClientGoneError(Exception):
    """The client went away before its request had arrived whole."""


async def read_body(receive: Receive, bytes_max: int) -> bytes:
    """Return the request's whole body; raises Refusal if it is longer than `bytes_max`."""
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        length += len(part)
        if length > bytes_max:
            raise Refusal.own(413, f"the request's body is longer than {bytes_max} bytes", "request_too_large")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
