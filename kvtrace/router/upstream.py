"""The engines as the router sees them: addresses, requests in flight, HTTP."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from kvtrace.router.config import Coordinates
from kvtrace.router.headers import Headers, LegHeaders, to_client
from kvtrace.router.policy import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrace.router.config import EngineAddress, RouterConfig

PREFILL = "prefill"
DECODE = "decode"
_HEADER_BYTES_MAX = 64 << 10
_FINAL_STATUSES = range(200, 600)  # what is below announces another reply, and nothing is above
_QUOTING = re.compile(r"""[:\n'"]""")  # one of aiohttp's two parsers quotes behind a colon, the other at once
_TRANSFER_ID_SINCE = (0, 34)


class LegError(Exception):
    """A leg got no reply, or lost it: which leg, and why."""

    def __init__(self, leg: str, url: str, reason: str, *, unreached: bool = False) -> None:
        super().__init__(f"the {leg} engine at {url} {reason}")
        self.leg = leg
        self.reason = reason
        self.unreached = unreached
        """True if the engine cannot have seen the request, so that another attempt does no work twice."""


class Engine:
    """One engine: its address, what this router has in flight on it, and what it has told so far."""

    def __init__(self, leg: str, index: int, address: EngineAddress) -> None:
        self.leg = leg
        self.index = index
        self.url = address.url
        self.coordinates = address.coordinates
        self.release: tuple[int, int] | None = None
        self.inflight = 0
        self.tokens = 0

    def candidate(self) -> Candidate:
        """Return what a policy may know of it now."""
        return Candidate(self.index, self.url, self.inflight, self.tokens)

    @contextmanager
    def holding(self, tokens: int) -> Iterator[None]:
        """Count one request of `tokens` prompt tokens as in flight here."""
        self.inflight += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.inflight -= 1
            self.tokens -= tokens

    def learn(self, params: dict[str, Any]) -> None:
        """Take P's coordinates from the kv_transfer_params of its own reply; they change when it restarts."""
        try:
            self.coordinates = Coordinates(
                str(params["remote_engine_id"]),
                str(params["remote_host"]),
                int(params["remote_port"]),
                *(int(params.get(name) or 1) for name in ("tp_size", "pp_size", "dcp_size")),
            )
        except (KeyError, TypeError, ValueError):
            return

    def learn_release(self, version: str) -> None:
        """Take the engine's release from what its /version says."""
        numbers = re.match(r"(\d+)\.(\d+)", version)
        self.release = (int(numbers[1]), int(numbers[2])) if numbers else None

    @property
    def takes_transfer_id(self) -> bool:
        """Return whether its release is known to take a `transfer_id` in push."""
        return self.release is not None and self.release >= _TRANSFER_ID_SINCE


class Reply:
    """An engine's reply: status and headers at once, the body as it comes."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse) -> None:
        self.engine = engine
        self.status = response.status
        self._response = response

    @property
    def ok(self) -> bool:
        """Return whether the status is a success."""
        return 200 <= self.status < 300

    @property
    def headers(self) -> Headers:
        """Return the headers that travel on to the client."""
        return to_client(self._response.raw_headers)

    @property
    def is_event_stream(self) -> bool:
        """Return whether the body is a stream of server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def chunk(self) -> bytes:
        """Return the next bytes as they arrived; none at the end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise LegError(self.engine.leg, self.engine.url, f"broke its reply off: {_reason(error)}") from error

    async def body(self, bytes_max: int) -> bytes:
        """Return the whole body, which may not be longer than `bytes_max`."""
        whole = bytearray()
        while chunk := await self.chunk():
            whole += chunk
            if len(whole) > bytes_max:
                raise LegError(self.engine.leg, self.engine.url, f"sent more than {bytes_max} bytes")
        return bytes(whole)

    def close(self) -> None:
        """Give the connection back if the reply was read whole; else end it, so that the engine aborts the request."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Client:
    """The connections to all engines: kept alive, bounded for each engine."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Get ready; needs the running event loop."""
        config = self._config
        self._session = aiohttp.ClientSession(
            # Bounded for each engine and not in all: a decode leg that waits for a prefill leg must not take its place.
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=config.max_connections, keepalive_timeout=config.keepalive_s
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            max_line_size=_HEADER_BYTES_MAX,
            max_field_size=_HEADER_BYTES_MAX,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def post(self, engine: Engine, path: str, body: bytes, headers: LegHeaders) -> Reply:
        """Send a leg and return the reply's head."""
        return await self._request("POST", engine, path, body, headers)

    async def get(self, engine: Engine, path: str, headers: LegHeaders | None) -> Reply:
        """Ask an engine about itself and return the reply's head."""
        return await self._request("GET", engine, path, None, headers)

    async def _request(
        self, method: str, engine: Engine, path: str, body: bytes | None, headers: LegHeaders | None
    ) -> Reply:
        if self._session is None:
            raise RuntimeError("the client is not open")
        try:
            response = await self._session.request(
                method, engine.url + path, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = f"cannot be reached: {_reason(error)}"
            raise LegError(engine.leg, engine.url, reason, unreached=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegError(engine.leg, engine.url, f"gave no reply: {_reason(error)}") from error
        if response.status not in _FINAL_STATUSES:
            response.close()
            raise LegError(engine.leg, engine.url, f"gave no reply: {response.status} is no status of one")
        return Reply(engine, response)


def _reason(error: BaseException) -> str:
    """Return what went wrong, without the bytes that aiohttp quotes: they may be of an answer, or of a header."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it is no HTTP ({_unquoted(error.message)})"
    if isinstance(error, aiohttp.ClientPayloadError):
        return _unquoted(str(error))
    return str(error) or type(error).__name__


def _unquoted(message: str) -> str:
    return _QUOTING.split(message, maxsplit=1)[0].rstrip()
