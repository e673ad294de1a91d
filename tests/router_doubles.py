"""Doubles of engines for the router's tests: real HTTP servers that answer as vLLM does, or misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn

from kvtrace import emit, stages
from kvtrace.router.app import create_app
from kvtrace.router.config import EngineAddress, Mode, RouterConfig
from tests.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest
    from starlette.types import Receive, Scope, Send

    from kvtrace.router.policy import Policy

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
TOKENS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(3)] + [b"data: [DONE]\n\n"]
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'


@dataclass
class Seen:
    """One request as an engine got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    disconnected: bool = False


@dataclass
class EngineDouble:
    """An engine: what it answers, when, and what it got."""

    name: str = "p0"
    hand_over: bool = True
    """Whether, as P, its reply carries kv_transfer_params."""
    status: int = 200
    error: bytes = b'{"error": {"message": "no"}}'
    chunks: list[bytes] = field(default_factory=lambda: list(TOKENS))
    plain: bytes = b'{"choices": [{"text": "whole"}]}'
    break_off: bool = False
    """Whether a streamed answer ends without its end."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is answered before it is set, which it is from the start."""
    pauses_before: int | None = None
    """Number of the chunk before which the gate closes."""
    paused: bool = False
    chunks_sent: int = 0
    raw: list[bytes] = field(default_factory=list)
    """Bodies as they came."""
    release: str = "0.32.0+cpu"
    seen: list[Seen] = field(default_factory=list)
    looked_up: list[str] = field(default_factory=list)
    """What was asked of it by GET, once that is answered."""
    url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw = await _read(receive)
        if scope["method"] == "GET":
            await self._about(scope["path"], send)
            self.looked_up.append(scope["path"])
            return
        headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
        self.raw.append(raw)
        seen = Seen(scope["path"], headers, json.loads(raw))
        self.seen.append(seen)
        if not await self._opened(seen, receive):
            return
        if self.status != 200:
            await _whole(send, self.status, [*JSON, (b"x-engine", self.name.encode())], self.error)
        elif (seen.body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            await _whole(send, 200, JSON, json.dumps(self._prefilled(seen)).encode())
        elif seen.body.get("stream"):
            await self._stream(seen, receive, send)
        else:
            await _whole(send, 200, JSON, self.plain)

    async def _about(self, path: str, send: Send) -> None:
        if path == "/v1/models":
            await _whole(send, self.status, JSON, json.dumps({"object": "list", "data": [{"id": self.name}]}).encode())
        elif path == "/version":
            await _whole(send, 200, JSON, json.dumps({"version": self.release}).encode())
        else:
            await _whole(send, self.status, [], b"")

    async def _opened(self, seen: Seen, receive: Receive) -> bool:
        opened, gone = asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(receive())
        await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
        seen.disconnected = gone.done()
        for task in (opened, gone):
            task.cancel()
        return not seen.disconnected

    def _prefilled(self, seen: Seen) -> dict[str, Any]:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.name,
            "remote_request_id": f"cmpl-{seen.headers['x-request-id']}-0-0123abcd",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 1,
            "dcp_size": 1,
            "remote_num_tokens": 3,
        }
        return {"choices": [{"text": "0"}], "kv_transfer_params": params if self.hand_over else None}

    async def _stream(self, seen: Seen, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for number, chunk in enumerate(self.chunks):
            if number == self.pauses_before:
                self.gate.clear()
                self.paused = True
            if not await self._opened(seen, receive):
                return
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self.chunks_sent += 1
            await asyncio.sleep(0.001)
        if not self.break_off:
            await send({"type": "http.response.body", "body": b""})


async def _read(receive: Receive) -> bytes:
    raw = b""
    while True:
        message = await receive()
        raw += message.get("body", b"")
        if not message.get("more_body"):
            return raw


async def _whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class Stamp:
    """One record as the router emitted it."""

    stage: str
    request: str
    a: int
    b: int
    c: int
    d: int
    ref: str


class Stamps(emit.NullEmitter):
    """An emitter that keeps what it gets."""

    def __init__(self) -> None:
        self.all: list[Stamp] = []
        self.facts: dict[str, str] = {}

    def emit(
        self, code: int, request: str = "", a: int = 0, b: int = 0, c: int = 0, d: int = 0, ref: str = "", t_ns: int = 0
    ) -> None:
        """Keep the record."""
        self.all.append(Stamp(stages.BY_CODE[code].name.removeprefix("router."), request, a, b, c, d, ref))

    def fact(self, name: str, value: str) -> None:
        """Keep the fact."""
        self.facts[name] = value

    def order(self) -> list[str]:
        """Return the stages in the order they came, candidates and the place in a trace left out."""
        return [stamp.stage for stamp in self.all if stamp.stage not in ("candidate", "traced")]

    def named(self, stage: str) -> list[Stamp]:
        """Return the records of one stage."""
        return [stamp for stamp in self.all if stamp.stage == stage]

    async def wait_for(self, stage: str) -> Stamp:
        """Return the first record of `stage` once it is there."""
        await until(lambda: self.named(stage))
        return self.named(stage)[0]

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> Stamps:
        """Return one that the router emits to."""
        stamps = cls()
        monkeypatch.setattr(emit, "tracer", lambda: stamps)
        return stamps


async def until(holds: Callable[[], object]) -> None:
    """Return once `holds()` is true; raise TimeoutError where it does not become so."""
    async with asyncio.timeout(LONG_S):
        while not holds():  # noqa: ASYNC110 -- what is waited for has no event of its own
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a free port; yields its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def routing(
    mode: Mode,
    prefill: list[EngineDouble],
    decode: list[EngineDouble],
    *,
    told: bool = True,
    policy: Policy | None = None,
    **settings: Any,
) -> AsyncIterator[str]:
    """Serve engines and a router before them; yields the router's address. `told`: P's coordinates are options."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in (*prefill, *decode):
            if not engine.url:
                engine.url = await stack.enter_async_context(serving(engine))
        named = ",engine_id={},host=127.0.0.1,port=5600" if told else ""
        config = RouterConfig(
            mode=mode,
            prefill=tuple(EngineAddress.parse(engine.url + named.format(engine.name)) for engine in prefill),
            decode=tuple(EngineAddress.parse(engine.url) for engine in decode),
            **{"grace_s": 1.0} | settings,
        )
        yield await stack.enter_async_context(serving(create_app(config, policy)))


def refused_url() -> str:
    """Return an address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
