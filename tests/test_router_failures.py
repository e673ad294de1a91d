"""Engines that fail, break off or cannot be reached, clients that leave: told truly, and nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from kvtrace.router.config import Mode
from tests.dispatched import BODY, BOTH, post
from tests.router_doubles import TOKENS, EngineDouble, Stamps, refused_url, routing, until


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    return Stamps.installed(monkeypatch)


@BOTH
async def test_a_clients_own_kv_transfer_params_reach_no_engine(stamps: Stamps, mode: Mode) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(mode, [prefill], [decode]) as url:
        await post(url, BODY | {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}})

    assert all("evil" not in str(seen.body) for seen in (*prefill.seen, *decode.seen))


@BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_p_is_passed_on_whole_and_d_is_let_go(stamps: Stamps, mode: Mode, stream: bool) -> None:
    prefill, decode = EngineDouble("p0", status=422, error=b'{"error":"bad \xc3\xbc"}'), EngineDouble("d0")
    prefill.gate.clear()
    decode.gate.clear()

    async with routing(mode, [prefill], [decode]) as url:
        request = asyncio.create_task(post(url, BODY | {"stream": stream}))
        await until(lambda: prefill.seen and (decode.seen or mode is Mode.PULL))
        prefill.gate.set()
        status, body, headers = await request
        await until(lambda: all(seen.disconnected for seen in decode.seen))

    assert (status, body) == (422, prefill.error)
    assert (headers["content-type"], headers["x-engine"]) == ("application/json", "p0")
    assert len(decode.seen) == (1 if mode is Mode.PUSH else 0)
    assert stamps.named("failed")[0].ref == "prefill: 422"


@BOTH
async def test_an_error_of_d_is_passed_on_whole_and_p_is_let_go(stamps: Stamps, mode: Mode) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0", status=503)
    decode.gate.clear()
    if mode is Mode.PUSH:
        prefill.gate.clear()

    async with routing(mode, [prefill], [decode]) as url:
        request = asyncio.create_task(post(url))
        await until(lambda: prefill.seen and decode.seen)
        decode.gate.set()
        status, body, headers = await request
        await until(lambda: prefill.seen[0].disconnected or mode is Mode.PULL)

    assert (status, body, headers["x-engine"]) == (503, decode.error, "d0")
    assert prefill.seen[0].disconnected == (mode is Mode.PUSH)
    assert stamps.named("failed")[0].a == 503


@BOTH
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engine_that_cannot_be_reached_is_a_502_that_names_the_leg(
    stamps: Stamps, mode: Mode, leg: str
) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")
    (prefill if leg == "prefill" else decode).url = refused_url()
    decode.gate.clear()

    async with routing(mode, [prefill], [decode]) as url:
        status, body, _ = await post(url)

    assert status == 502
    error = json.loads(body)["error"]
    assert error["code"] == f"{leg}_unreachable"
    assert leg in error["message"]
    assert stamps.named("failed")[0].ref.startswith(f"{leg}: ")


async def test_another_attempt_has_another_id_and_is_made_only_when_asked_for(stamps: Stamps) -> None:
    dead, alive, decode = EngineDouble("p0", url=refused_url()), EngineDouble("p1"), EngineDouble("d0")

    async with routing(Mode.PULL, [dead, alive], [decode], attempts=2) as url:
        status, _, headers = await post(url)

    first, second = stamps.named("received")
    assert status == 200
    assert (first.a, second.a) == (0, 1)
    assert first.request != second.request == headers["X-Kvtrace-Request-Id"]
    assert stamps.named("failed")[0].request == first.request


async def test_an_answer_that_breaks_off_breaks_off_for_the_client_too(stamps: Stamps) -> None:
    decode = EngineDouble("d0", chunks=TOKENS[:2], break_off=True)

    async with routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url:
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(url)

    assert stamps.named("failed")[0].a == 200
    assert stamps.named("done") == []


async def test_a_connection_that_breaks_behind_the_end_mark_was_a_whole_answer(stamps: Stamps) -> None:
    decode = EngineDouble("d0", break_off=True)

    async with routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url:
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(url)

    assert stamps.named("failed") == []
    assert stamps.named("done")[0].b == 3


@contextlib.asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """Serve an engine that sends these bytes, whatever it is asked; yields its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n", "999 is no status of one"),
        (b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "101 is no status of one"),
        (b"an answer's words\r\n\r\n", "it is no HTTP (Bad status line)"),
        (b"HTTP/1.1 200 OK\r\nx-secret: words\r\n", "it closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwords\r\n", "it is no HTTP"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 100\r\n\r\nwords", "Response payload is not completed"),
    ],
)
async def test_a_reply_that_is_none_is_a_502_that_quotes_nothing_of_it(stamps: Stamps, reply: bytes, told: str) -> None:
    async with (
        answering(reply) as url,
        routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0", url=url)]) as router,
    ):
        status, body, _ = await post(router)

    assert status == 502
    for said in (json.loads(body)["error"]["message"], stamps.named("failed")[0].ref):
        assert told in said
        assert "words" not in said


async def test_a_header_that_http_forbids_stays_behind(stamps: Stamps) -> None:
    reply = b"HTTP/1.1 200 OK\r\nx-odd: a\x01b\r\nx-even: c\r\ncontent-length: 2\r\n\r\n{}"
    async with (
        answering(reply) as url,
        routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0", url=url)]) as router,
    ):
        status, body, headers = await post(router)

    assert (status, body) == (200, b"{}")
    assert (headers.get("x-even"), headers.get("x-odd")) == ("c", None)


async def test_an_error_inside_the_stream_is_no_success(stamps: Stamps) -> None:
    decode = EngineDouble("d0", chunks=[TOKENS[0], b'data: {"error": {"message": "engine died"}}\n\n'])

    async with routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url:
        status, body, _ = await post(url)

    assert (status, body) == (200, b"".join(decode.chunks))
    assert stamps.named("failed")[0].ref == "decode: an error in the stream"


@BOTH
@pytest.mark.parametrize("stuck", ["prefill", "decode", "stream"])
async def test_a_client_that_goes_away_takes_its_legs_along(stamps: Stamps, mode: Mode, stuck: str) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0", chunks=TOKENS[:1] * 10_000)
    if stuck != "stream":
        (prefill if stuck == "prefill" else decode).gate.clear()
    if stuck == "prefill":
        decode.gate.clear()
    reached = (1, 0 if (mode, stuck) == (Mode.PULL, "prefill") else 1)

    async with routing(mode, [prefill], [decode]) as url:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(url + "/v1/completions", json=BODY))
            await until(lambda: (len(prefill.seen), len(decode.seen)) == reached)
            if stuck == "stream":
                await stamps.wait_for("first_token")
            request.cancel()
        await stamps.wait_for("cancelled")
        left = [*decode.seen, *(prefill.seen if stuck == "prefill" else ())]
        await until(lambda: all(seen.disconnected for seen in left))

    assert (len(prefill.seen), len(decode.seen)) == reached
    assert stamps.order()[-1] == "cancelled"
    assert stamps.named("done") == stamps.named("failed") == []
