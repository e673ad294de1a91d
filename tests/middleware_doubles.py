"""A real server behind the middleware, what it answers, and a tracer that keeps events in a list."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from instrumented_connectors.middleware import TraceMiddleware
from kvtrace import stages
from tests.waiting import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

Event = namedtuple("Event", "name request a b t_ns")


class ListTracer:
    """Keeps events in a list; raises instead when `broken`."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.broken = False
        self.events: list[Event] = []
        self.facts: dict[str, str] = {}
        self.disabled: list[str] = []

    def emit(
        self, code: int, request: str = "", a: int = 0, b: int = 0, c: int = 0, d: int = 0, ref: str = "", t_ns: int = 0
    ) -> None:
        if self.broken:
            raise RuntimeError("put in by the test")
        self.events.append(Event(stages.BY_CODE[code].name, request, a, b, t_ns or time.monotonic_ns()))

    def fact(self, name: str, value: str) -> None:
        self.facts[name] = value

    def disable(self, where: str, error: BaseException | str) -> None:
        self.enabled = False
        self.disabled.append(f"{where}: {error}")

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def wait_for(self, name: str) -> Event:
        until(lambda: name in self.names(), what=f"there is {name}")
        return next(event for event in self.events if event.name == name)


def completion(text: str, **more: Any) -> str:
    return "data: " + json.dumps({"id": "cmpl-own-7", "choices": [{"index": 0, "text": text}], **more}) + "\n\n"


def chat(delta: dict[str, Any]) -> str:
    return "data: " + json.dumps({"id": "chatcmpl-own-8", "choices": [{"index": 0, "delta": delta}]}) + "\n\n"


CHUNKS = [completion(""), completion("a"), completion("b"), completion(""), "data: [DONE]\n\n"]


async def generate(request: Request) -> Any:
    body = await request.json()
    if body.get("fail"):
        raise RuntimeError("the application's own")
    if not body.get("stream"):
        return JSONResponse({"id": "cmpl-own-9", "choices": [{"text": "ab"}]}, status_code=body.get("status", 200))

    async def chunks() -> Any:
        for chunk in body.get("chunks", CHUNKS):
            yield chunk
            await asyncio.sleep(body.get("pause_s", 0))

    return StreamingResponse(chunks(), media_type="text/event-stream")


class Config:
    """The corner of vLLM's configuration that its server keeps in the application's state."""

    def __init__(self, role: str) -> None:
        self.kv_transfer_config = type(
            "Transfer", (), {"kv_role": role, "engine_id": "e-1", "kv_connector": "NixlPushConnector"}
        )


@contextmanager
def serving(role: str = "") -> Iterator[str]:
    """Serve the application behind the middleware on a free port; yield its address."""
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
    app: Any = Starlette(routes=[Route(path, generate, methods=["POST"]) for path in paths])
    app.add_middleware(TraceMiddleware)
    if role:
        app.state.vllm_config = Config(role)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def post(
    url: str, body: dict[str, Any], request: str = "r-1", path: str = "/v1/completions", content: Any = None
) -> httpx.Response:
    headers = {"X-Request-Id": request, "content-type": "application/json"} if request else {}
    return httpx.post(url + path, content=content or json.dumps(body), headers=headers, timeout=LONG_S)


PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


DECODE = {
    "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": list(range(5000))}
}
