"""The ASGI middleware in front of a real server, with a real client."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from instrumented_connectors.bodies import StreamScan, TransferParamsScan, event_has_content
from instrumented_connectors.middleware import TraceMiddleware
from kvtrace import emit, stages
from kvtrace.segments import SegmentFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            for event in self.events:
                if event.name == name:
                    return event
            time.sleep(0.005)
        raise AssertionError(f"no {name} in {self.names()}")


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


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> ListTracer:
    tracer = ListTracer()
    monkeypatch.setattr(emit, "tracer", lambda: tracer)
    return tracer


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
    return httpx.post(url + path, content=content or json.dumps(body), headers=headers, timeout=10)


PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
DECODE = {
    "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": list(range(5000))}
}


def test_streamed_decode_leg_stamps_the_first_content_and_counts_it(tracer: ListTracer) -> None:
    with serving() as url:
        before_ns = time.monotonic_ns()
        reply = post(url, {"stream": True, "pause_s": 0.05, **DECODE})
        assert reply.text == "".join(CHUNKS)
        tracer.wait_for("decode.http_done")
    assert tracer.names() == ["decode.http_received", "decode.first_token_out", "decode.http_done"]
    received, first, done = tracer.events
    assert {event.request for event in tracer.events} == {"r-1"}
    assert before_ns < received.t_ns
    assert first.t_ns - received.t_ns >= 50_000_000, "the empty chunk before it is no first token"
    assert done.t_ns - first.t_ns >= 100_000_000
    assert (done.a, done.b) == (200, 2)


def test_prefill_leg_has_received_responded_done(tracer: ListTracer) -> None:
    with serving() as url:
        post(url, PREFILL)
        tracer.wait_for("prefill.http_done")
    assert tracer.names() == ["prefill.http_received", "prefill.http_responded", "prefill.http_done"]
    assert [event.a for event in tracer.events] == [0, 200, 200]


def test_reply_that_is_not_streamed_has_no_first_token(tracer: ListTracer) -> None:
    with serving() as url:
        post(url, DECODE)
        tracer.wait_for("decode.http_done")
    assert tracer.names() == ["decode.http_received", "decode.http_done"]


@pytest.mark.parametrize(
    ("role", "leg"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "decode"), ("", "decode")]
)
def test_request_that_names_no_leg_goes_by_the_engines_role(tracer: ListTracer, role: str, leg: str) -> None:
    with serving(role) as url:
        post(url, {})
        tracer.wait_for(f"{leg}.http_done")
    assert tracer.facts["kind"] == "api"
    assert tracer.facts.get("role", "") == role


def test_a_prompt_that_quotes_the_parameters_fools_nobody(tracer: ListTracer) -> None:
    prompt = json.dumps(PREFILL)
    with serving() as url:
        post(url, {"prompt": prompt, "messages": [{"content": prompt}], "stop": ["kv_transfer_params"]})
        tracer.wait_for("decode.http_done")
    assert tracer.names()[0] == "decode.http_received"


def test_a_body_of_megabytes_in_small_pieces_is_read_right_and_passed_on_whole(tracer: ListTracer) -> None:
    body = json.dumps({"prompt": "do_remote_prefill " * 200_000, **PREFILL, "status": 201}).encode()
    pieces = (body[at : at + 50_001] for at in range(0, len(body), 50_001))
    with serving() as url:
        reply = post(url, {}, content=pieces)
        tracer.wait_for("prefill.http_done")
    assert reply.status_code == 201
    assert tracer.events[-1].a == 201


def test_client_that_goes_away_is_disconnected_and_not_done(tracer: ListTracer) -> None:
    with serving() as url:
        body = {"stream": True, "pause_s": 0.2, "chunks": [completion("a")] * 20}
        with httpx.stream("POST", url + "/v1/completions", json=body, headers={"x-request-id": "r-1"}) as reply:
            next(reply.iter_bytes())
        tracer.wait_for("decode.http_disconnected")
    assert tracer.names() == ["decode.http_received", "decode.first_token_out", "decode.http_disconnected"]


def test_request_without_an_id_is_known_by_the_id_in_its_reply(tracer: ListTracer) -> None:
    with serving() as url:
        post(url, {"stream": True, "pause_s": 0.05}, request="")
        tracer.wait_for("decode.http_done")
    received, first, _ = tracer.events
    assert {event.request for event in tracer.events} == {"own-7"}
    assert first.t_ns - received.t_ns >= 50_000_000, "the arrival keeps its own time"


def test_failures_of_the_application_stay_its_own(tracer: ListTracer) -> None:
    with serving() as url:
        assert post(url, {"fail": True}).status_code == 500
        event = tracer.wait_for("decode.http_done")
    assert event.a == 500
    assert tracer.disabled == []


def test_other_routes_and_methods_are_left_alone(tracer: ListTracer) -> None:
    with serving() as url:
        post(url, {}, path="/v1/embeddings")
        assert httpx.get(url + "/v1/completions").status_code == 405
    assert tracer.events == []


@pytest.mark.parametrize("body", [PREFILL, {**DECODE, "stream": True}])
def test_an_error_in_tracing_never_reaches_the_reply(tracer: ListTracer, body: dict[str, Any]) -> None:
    tracer.broken = True
    with serving() as url:
        for _ in range(2):
            assert post(url, body).status_code == 200
    assert len(tracer.disabled) == 1


@pytest.mark.parametrize(("enabled", "kind"), [(False, "http"), (True, "websocket"), (True, "lifespan")])
def test_switched_off_or_no_request_it_hands_through_the_very_same_callables(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, kind: str
) -> None:
    monkeypatch.setattr(emit, "tracer", lambda: ListTracer(enabled=enabled))
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {"type": kind, "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(TraceMiddleware(app)(scope, receive, send))
    assert seen == [scope, receive, send]
    assert set(scope) == {"type", "method", "path", "headers"}


def test_the_flag_given_twice_emits_once(tracer: ListTracer) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"x-request-id", b"r-1")]}
    asyncio.run(TraceMiddleware(TraceMiddleware(app))(scope, receive, send))
    assert tracer.names() == ["decode.http_received", "decode.http_done"]


def test_cancelled_and_broken_sends_are_disconnects(tracer: ListTracer) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def serve(error: BaseException) -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise error

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"x-request-id", b"r-1")]}
        with pytest.raises(type(error)):
            await TraceMiddleware(app)(scope, receive, send)

    for error in (OSError("peer gone"), asyncio.CancelledError()):
        tracer.events.clear()
        asyncio.run(serve(error))
        assert tracer.names() == ["decode.http_received", "decode.http_disconnected"]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize(
    ("body", "prefill"),
    [
        ('{"kv_transfer_params": {"do_remote_decode": true}}', True),
        ('{"kv_transfer_params"\n :\t{"do_remote_prefill":true, "x": "}"}}', False),
        ('{"kv_transfer_params": {"do_remote_decode": false, "do_remote_prefill": false}}', None),
        ('{"kv_transfer_params": null, "prompt": "äöü"}', None),
        ('{"prompt": "\\"kv_transfer_params\\": {\\"do_remote_decode\\": true}"}', None),
        ('{"stop": ["kv_transfer_params"], "kv_transfer_params": {"do_remote_decode": true}}', True),
        ('{"kv_transfer_params": {"do_remote_decode"', None),
        ("not json at all", None),
        ("", None),
    ],
)
def test_the_leg_is_found_however_the_body_is_cut(body: str, prefill: bool | None, size: int) -> None:
    scan = TransferParamsScan()
    data = body.encode()
    found = [scan.feed(data[at : at + size]) for at in range(0, max(len(data), 1), size)]
    assert next((leg for leg in found if leg is not None), None) is prefill


def test_nesting_beyond_the_interpreters_depth_is_no_leg_and_no_content() -> None:
    deep = b"[" * 100_000

    assert TransferParamsScan().feed(b'{"kv_transfer_params": ' + deep) is None
    assert not StreamScan().feed(b'data: {"choices": ' + deep + b"\n")


@pytest.mark.parametrize("event", [{"choices": 3}, {"choices": [None, 3]}, {"choices": [{"delta": "x"}]}])
def test_odd_events_carry_no_content(event: dict[str, Any]) -> None:
    assert not event_has_content(event)


def test_the_scan_holds_a_bounded_part_of_a_body() -> None:
    scan = TransferParamsScan()
    for _ in range(100):
        scan.feed(b"x" * 100_000)
    assert len(scan.held) < 100
    scan.feed(b'"kv_transfer_params": {"a": [')
    for _ in range(100):
        scan.feed(b"1," * 50_000)
    assert len(scan.held) <= 2 * scan.LONGEST_BYTES


@pytest.mark.parametrize(
    ("delta", "content"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"content": None}, False),
        ({}, False),
        ({"content": "a"}, True),
        ({"reasoning": "hm"}, True),
        ({"reasoning_content": "hm"}, True),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, True),
    ],
)
def test_first_content_of_a_chat(delta: dict[str, Any], content: bool) -> None:
    assert StreamScan().feed(chat(delta).encode()) is content


def test_events_of_other_dialects() -> None:
    assert event_has_content({"type": "response.output_text.delta", "delta": "a"})
    assert event_has_content({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}})
    assert event_has_content({"choices": [{"token_ids": [5]}]})
    assert not event_has_content({"type": "response.created", "response": {"tools": [{"name": "f"}]}})
    assert not event_has_content({"choices": [], "usage": {"prompt_tokens": 5}})
    assert not event_has_content({"error": {"message": "text"}})


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_content_is_counted_however_the_stream_is_cut(size: int) -> None:
    stream = ("".join(CHUNKS).replace("\n", "\r\n") + completion('say "text": "x"') + ": comment\n\n").encode()
    scan = StreamScan()
    firsts = [scan.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert firsts.count(True) == 1
    assert scan.chunks == 3


@pytest.mark.parametrize("text", ["", "a", '"', "\\", '"text":"x"', "ä"])
def test_counting_and_parsing_agree(text: str) -> None:
    line = completion(text).encode()
    scan = StreamScan()
    scan.feed(line)
    parsed = scan.chunks
    scan.chunks = 1
    scan.feed(line)
    assert scan.chunks - 1 == parsed


SERVER = """
import json, socket, sys
import uvicorn
from instrumented_connectors.middleware import TraceMiddleware

async def app(scope, receive, send):
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for text in ("", "a"):
            event = json.dumps({"choices": [{"text": text}]}).encode()
            await send({"type": "http.response.body", "body": b"data: " + event + b"\\n\\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
server = uvicorn.Server(uvicorn.Config(TraceMiddleware(app), log_level="critical", lifespan="off"))
server.run(sockets=[listener])
"""


def test_what_was_answered_is_in_the_spool_of_a_killed_server(tmp_path: Path) -> None:
    environment = {**os.environ, "KVTRACE_SPOOL": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    for number in range(3):
        post(url, DECODE, request=f"r-{number}")
    server.kill()
    server.wait()
    rows: list[tuple[str, str]] = []
    facts: dict[str, str] = {}
    for path in sorted(tmp_path.glob("*.kvt")):
        batch = SegmentFile.open(path).poll()
        own = (row for row in batch.records if row["request"])
        rows += [(stages.BY_CODE[row["code"]].name, batch.strings[row["request"]]) for row in own]
        facts |= batch.facts
    points = ("decode.http_received", "decode.first_token_out", "decode.http_done")
    assert rows == [(point, f"r-{number}") for number in range(3) for point in points]
    assert facts["kind"] == "api"
