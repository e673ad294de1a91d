"""HTTP points of vLLM's API server: `--middleware instrumented_connectors.middleware.TraceMiddleware`.

Plain ASGI, so that a streamed reply stays streamed, and the outermost layer, since vLLM adds its own first.
Nothing of a request is changed: no header is added, no body is held back. Where the client sends no
X-Request-Id, vLLM makes an id of its own (or takes the body's `request_id`); the reply carries it, so the
points of such a request are emitted, with their true times, once the reply's first bytes name it.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from instrumented_connectors.bodies import StreamScan, TransferParamsScan
from kvtrace import emit, stages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Ends of the paths that generate, below whatever prefix: OpenAI's, Anthropic's, Cohere's, SageMaker's, vLLM's own.
_GENERATING = ("/completions", "/completions/batch", "/responses", "/messages", "/chat", "/invocations", "/generate")
_MARK = "kvtrace.traced"
_PROFILE_VARIABLE = "KVTRACE_PROFILE"  # `kvtrace.profiler` has it too; without it, nothing about profiles is imported
_REPLY_ID = re.compile(rb'(?<!\\)"(?:request_)?id"\s*:\s*"([^"\\]{1,256})"')
_REPLY_ID_PREFIX = re.compile(r"(?:chatcmpl|cmpl|generate-tokens)-")

# Per leg, decode first: indexed by `prefill`, a bool.
_RECEIVED = (stages.DECODE_HTTP_RECEIVED.code, stages.PREFILL_HTTP_RECEIVED.code)
_DONE = (stages.DECODE_HTTP_DONE.code, stages.PREFILL_HTTP_DONE.code)
_DISCONNECTED = (stages.DECODE_HTTP_DISCONNECTED.code, stages.PREFILL_HTTP_DISCONNECTED.code)
_FIRST_TOKEN_OUT = stages.DECODE_FIRST_TOKEN_OUT.code
_RESPONDED = stages.PREFILL_HTTP_RESPONDED.code


class TraceMiddleware:
    """Wraps the server's application; hands everything through untouched where tracing is off."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.tracer = emit.tracer()
        self.producer: bool | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of the server."""
        exchange = self._begin(scope) if self.tracer.enabled else None
        if exchange is None:
            await self.app(scope, receive, send)
            return

        async def traced_receive() -> Message:
            message = await receive()
            exchange.received(message)
            return message

        async def traced_send(message: Message) -> None:
            exchange.sending(message)
            await send(message)
            if exchange.finishing:
                exchange.sent(message)

        try:
            await self.app(scope, traced_receive, traced_send)
        except BaseException as error:
            exchange.left(error)
            raise
        exchange.left(None)

    def _begin(self, scope: Scope) -> _Exchange | None:
        """Return the exchange to follow, None where the connection is no request to generate."""
        try:
            t_ns = time.monotonic_ns()
            if scope["type"] == "lifespan" and os.environ.get(_PROFILE_VARIABLE):
                _profile(self.tracer, scope)
            if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_GENERATING):
                return None
            if scope.get(_MARK):  # the flag was given twice
                return None
            scope[_MARK] = True
            if self.producer is None:
                self.producer = _describe(self.tracer, scope)
            request = next(_values(scope, b"x-request-id"), b"").decode("latin-1")
            return _Exchange(self.tracer, request, t_ns, producer=self.producer)
        except Exception as error:  # noqa: BLE001  tracing never reaches the application
            self.tracer.disable("middleware.begin", error)
            return None


def _values(holder: MutableMapping[str, Any], name: bytes) -> Iterator[bytes]:
    """Yield the values of one header of a scope or of a reply's start."""
    return (value for key, value in holder.get("headers", ()) if key.lower() == name)


def _describe(tracer: Any, scope: Scope) -> bool:
    """State what this server serves, as far as it says so; return True where its engine is a producer."""
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
    role = getattr(transfer, "kv_role", None)
    facts = {
        "kind": "api",
        "engine_id": getattr(transfer, "engine_id", None),
        "role": role,
        "connector": getattr(transfer, "kv_connector", None),
        "model": getattr(getattr(config, "model_config", None), "model", None),
        "vllm": getattr(sys.modules.get("vllm"), "__version__", None),
    }
    for name, value in facts.items():
        if value:
            tracer.fact(name, str(value))
    return bool(role == "kv_producer")


def _profile(tracer: Any, scope: Scope) -> None:
    """Profile this server before it serves anybody, since importing and starting the profiler takes a tenth of a s."""
    try:
        from instrumented_connectors import profiling
        from kvtrace import profiler

        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        transfer = getattr(config, "kv_transfer_config", None)
        names = (getattr(transfer, name, None) for name in ("kv_role", "engine_id", "kv_connector"))
        profiler.start(profiling.server_labels(*names), tracer)
    except Exception as error:  # noqa: BLE001  tracing goes on without profiles
        tracer.fact("profiles", f"off: {type(error).__name__}: {error}"[:200])


def _guarded(method: Callable[[_Exchange, Any], None]) -> Callable[[_Exchange, Any], None]:
    """Return the method so that whatever goes wrong in it ends tracing and nothing else."""

    @functools.wraps(method)
    def guarded(self: _Exchange, argument: Any) -> None:
        if self.tracer.enabled:
            try:
                method(self, argument)
            except Exception as error:  # noqa: BLE001  tracing never reaches the application
                self.tracer.disable(f"middleware.{method.__name__}", error)

    return guarded


class _Exchange:
    """One request and its reply, as the messages go by."""

    __slots__ = (
        "ended",
        "finishing",
        "prefill",
        "producer",
        "reply",
        "request",
        "responded",
        "scan",
        "status",
        "t_ns",
        "tracer",
    )

    def __init__(self, tracer: Any, request: str, t_ns: int, *, producer: bool) -> None:
        self.tracer = tracer
        self.request = request
        self.t_ns = t_ns
        self.producer = producer
        self.prefill: bool | None = None  # None until the leg is known
        self.scan: TransferParamsScan | None = TransferParamsScan()
        self.reply: StreamScan | None = None
        self.status = 0
        self.responded = False
        self.finishing = False
        self.ended = False

    @_guarded
    def received(self, message: Message) -> None:
        """Take in a message from the client: part of the body, or its leaving."""
        if message["type"] == "http.request":
            if self.scan is not None and self.prefill is None:
                prefill = self.scan.feed(message.get("body", b""))
                if prefill is not None or not message.get("more_body", False):
                    self._decide(prefill)
        elif message["type"] == "http.disconnect" and not self.finishing:  # servers also say so behind a whole reply
            self._end(_DISCONNECTED)

    @_guarded
    def sending(self, message: Message) -> None:
        """Take in a message of the reply that is about to be handed to the server."""
        t_ns = time.monotonic_ns()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if b"event-stream" in next(_values(message, b"content-type"), b""):
                self.reply = StreamScan()
            self._decide(None)
            return
        if message["type"] != "http.response.body":
            return
        self.finishing = not message.get("more_body", False)
        body = message.get("body", b"")
        if not body:
            return
        if not self.responded:
            self.responded = True
            self._name(body)
            if self.prefill and self.request:
                self.tracer.emit(_RESPONDED, self.request, self.status, t_ns=t_ns)
        if self.reply is not None and self.reply.feed(body) and not self.prefill and self.request:
            self.tracer.emit(_FIRST_TOKEN_OUT, self.request, self.status, t_ns=t_ns)

    @_guarded
    def sent(self, message: Message) -> None:
        """Take in that the server has taken a message of the reply."""
        if self.finishing and message["type"] == "http.response.body":
            self._end(_DONE)

    @_guarded
    def left(self, error: BaseException | None) -> None:
        """Take in that the application is through, by `error` if there is one."""
        if isinstance(error, Exception) and not self.status:
            self.status = 500  # answered outside this layer
            self._end(_DONE)
        else:
            self._end(_DISCONNECTED)

    def _decide(self, prefill: bool | None) -> None:
        """Settle the leg, by the engine's role where the request does not say, and emit the request's arrival."""
        if self.prefill is None:
            self.prefill = self.producer if prefill is None else prefill
            self.scan = None
            if self.request:
                self.tracer.emit(_RECEIVED[self.prefill], self.request, t_ns=self.t_ns)

    def _name(self, body: bytes) -> None:
        """Take the request's id from the reply where the client sent none, and emit the request's arrival."""
        match = None if self.request else _REPLY_ID.search(body)
        if match is not None:
            self.request = _REPLY_ID_PREFIX.sub("", match[1].decode(), count=1)
            self.tracer.emit(_RECEIVED[bool(self.prefill)], self.request, t_ns=self.t_ns)

    def _end(self, codes: tuple[int, int]) -> None:
        """Emit how the exchange ended, once."""
        if not self.ended:
            self.ended = True
            self._decide(None)
            if self.request:
                chunks = self.reply.chunks if self.reply is not None else 0
                self.tracer.emit(codes[bool(self.prefill)], self.request, self.status, chunks)
