"""Ids, trace context and headers of a request on their way through the router."""

from __future__ import annotations

import asyncio
import re

import pytest

from kvtrace.router.config import Mode
from tests.router_client import BODY, posted, raw, send
from tests.router_doubles import EngineDouble, Stamps, routing

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


TRACEPARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01")


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    return Stamps.installed(monkeypatch)


async def test_the_clients_id_is_an_alias_that_may_repeat(stamps: Stamps) -> None:
    prefill = EngineDouble("p0")

    async with routing(Mode.PULL, [prefill], [EngineDouble("d0")]) as url:
        answers = await asyncio.gather(*(send(url, x_request_id="mine") for _ in range(5)))

    minted = {headers["X-Kvtrace-Request-Id"] for _, _, headers in answers}
    assert [headers["X-Request-Id"] for _, _, headers in answers] == ["mine"] * 5
    assert len(minted) == 5
    assert {seen.headers["x-request-id"] for seen in prefill.seen} == minted
    assert {stamp.ref for stamp in stamps.named("received")} == {"mine"}


async def test_without_an_id_of_the_client_the_minted_one_is_returned(stamps: Stamps) -> None:
    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        _, _, headers = await send(url)

    assert headers["X-Request-Id"] == headers["X-Kvtrace-Request-Id"] == stamps.named("received")[0].request
    assert stamps.named("received")[0].ref == ""


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"x" * 10_000, "x" * 256),
        (b"a\tb", "a?b"),
        ("ü-名".encode(), "ü-名"),
        (b"\xff\xfe", "ÿþ"),
        (b"\xe2\x80\xae", "?"),
        (b'"; DROP TABLE request; --', '"; DROP TABLE request; --'),
    ],
)
async def test_a_hostile_id_breaks_nothing(stamps: Stamps, sent: bytes, kept: str) -> None:
    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        reader, writer = await raw(url, posted(BODY, b"x-request-id: " + sent))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        status, _, _ = await send(url)

    assert head.startswith(b"HTTP/1.1 200")
    assert b"\r\nx-request-id: %s\r\n" % kept.encode() in head
    assert stamps.named("received")[0].ref == kept
    assert status == 200


async def test_an_id_that_http_forbids_is_refused_and_the_router_goes_on(stamps: Stamps) -> None:
    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        reader, writer = await raw(url, posted(BODY, b"x-request-id: \x1b[2J"))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        status, _, _ = await send(url)

    assert head.startswith(b"HTTP/1.1 400")
    assert status == 200


async def test_trace_context_is_carried_through_on_both_legs(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        await send(url, traceparent=TRACE, tracestate="vendor=1,other=2")

    for engine in (prefill, decode):
        assert engine.seen[0].headers["traceparent"] == TRACE
        assert engine.seen[0].headers["tracestate"] == "vendor=1,other=2"


@pytest.mark.parametrize("sent", [{}, {"traceparent": "00-zz-1-1"}, {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"}])
async def test_trace_context_is_started_where_there_is_no_valid_one(stamps: Stamps, sent: dict[str, str]) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PULL, [prefill], [decode]) as url:
        await send(url, **sent)
        await send(url, **sent)

    first, second = (seen.headers["traceparent"] for seen in prefill.seen)
    assert TRACEPARENT.fullmatch(first)
    assert first != second
    assert [seen.headers["traceparent"] for seen in decode.seen] == [first, second]


def spans(traceparent: str) -> tuple[int, int]:
    """Return the trace and span ids of a traceparent."""
    _, trace_id, span_id, _ = traceparent.split("-")
    return int(trace_id, 16), int(span_id, 16)


def traced(stamps: Stamps) -> list[tuple[int, int, int, str]]:
    """Return trace id, client's span, router's own span and flags of each `router.traced`."""
    mask = (1 << 64) - 1
    return [((s.a & mask) << 64 | s.b & mask, s.c & mask, s.d & mask, s.ref) for s in stamps.named("traced")]


async def test_the_place_in_a_trace_is_recorded(stamps: Stamps) -> None:
    """The client's span where it sent one, else the router's own, which the legs are sent as their parent."""
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        await send(url, traceparent=TRACE)
        await send(url)

    first, second = traced(stamps)
    assert first == (*spans(TRACE), 0, TRACE[-2:])
    assert second == (
        spans(decode.seen[1].headers["traceparent"])[0],
        0,
        spans(prefill.seen[1].headers["traceparent"])[1],
        "01",
    )


async def test_where_spans_are_exported_the_legs_hang_below_the_routers(
    stamps: Stamps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTRACE_SPANS", "1")
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        await send(url, traceparent=TRACE, tracestate="vendor=1")

    ((trace_id, parent, own, flags),) = traced(stamps)
    assert (trace_id, parent, flags) == (*spans(TRACE), TRACE[-2:])
    assert own not in (0, parent)
    for engine in (prefill, decode):
        assert spans(engine.seen[0].headers["traceparent"]) == (trace_id, own)
        assert engine.seen[0].headers["tracestate"] == "vendor=1"


async def test_end_to_end_headers_travel_and_hop_by_hop_ones_do_not(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PULL, [prefill], [decode]) as url:
        await send(url, authorization="Bearer k", x_own="1", connection="x-mine", x_mine="2", accept_encoding="gzip")

    for engine in (prefill, decode):
        headers = engine.seen[0].headers
        assert (headers["authorization"], headers["x-own"]) == ("Bearer k", "1")
        assert headers["host"] == engine.url.removeprefix("http://")
        assert headers.keys().isdisjoint({"x-mine", "accept-encoding"})
