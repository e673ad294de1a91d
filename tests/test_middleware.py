"""The ASGI middleware in front of a real server, with a real client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from instrumented_connectors.middleware import TraceMiddleware
from kvtrace import emit, stages
from kvtrace.segments import SegmentFile

if TYPE_CHECKING:
    from pathlib import Path

from tests.middleware_doubles import CHUNKS, DECODE, PREFILL, ListTracer, completion, post, serving
from tests.waiting import LONG_S

TIMER_EARLY_NS = 2_000_000
"""An event loop counts a pause in whole milliseconds from when its turn began, so a pause may be that much shorter."""


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> ListTracer:
    tracer = ListTracer()
    monkeypatch.setattr(emit, "tracer", lambda: tracer)
    return tracer


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
    assert first.t_ns - received.t_ns >= 50_000_000 - TIMER_EARLY_NS, "the empty chunk before it is no first token"
    assert done.t_ns - first.t_ns >= 100_000_000 - 2 * TIMER_EARLY_NS
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
        body = {"stream": True, "pause_s": 0.2, "chunks": [completion("a")] * 1000}
        headers = {"x-request-id": "r-1"}
        with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers, timeout=LONG_S) as reply:
            next(reply.iter_bytes())
        tracer.wait_for("decode.http_disconnected")
    assert tracer.names() == ["decode.http_received", "decode.first_token_out", "decode.http_disconnected"]


def test_request_without_an_id_is_known_by_the_id_in_its_reply(tracer: ListTracer) -> None:
    with serving() as url:
        post(url, {"stream": True, "pause_s": 0.05}, request="")
        tracer.wait_for("decode.http_done")
    received, first, _ = tracer.events
    assert {event.request for event in tracer.events} == {"own-7"}
    assert first.t_ns - received.t_ns >= 50_000_000 - TIMER_EARLY_NS, "the arrival keeps its own time"


def test_failures_of_the_application_stay_its_own(tracer: ListTracer) -> None:
    with serving() as url:
        assert post(url, {"fail": True}).status_code == 500
        event = tracer.wait_for("decode.http_done")
    assert event.a == 500
    assert tracer.disabled == []


def test_other_routes_and_methods_are_left_alone(tracer: ListTracer) -> None:
    with serving() as url:
        post(url, {}, path="/v1/embeddings")
        assert httpx.get(url + "/v1/completions", timeout=LONG_S).status_code == 405
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
    httpx.get(url, timeout=LONG_S)  # answered behind the end of the last one, which its client may have seen first
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
