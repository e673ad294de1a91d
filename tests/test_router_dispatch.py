"""The two orders of dispatch, against engines that are doubles."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from kvtrace.router.config import Mode, TransferId
from tests.router_doubles import JSON, TOKENS, EngineDouble, Stamps, refused_url, routing, until

BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
BOTH = pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    return Stamps.installed(monkeypatch)


async def post(
    url: str, body: dict[str, Any] | None = None, path: str = "/v1/completions"
) -> tuple[int, bytes, Mapping[str, str]]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body or BODY) as reply:
        return reply.status, await reply.read(), reply.headers


async def test_pull_hands_the_reply_of_p_to_d_unchanged(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PULL, [prefill], [decode]) as url:
        status, body, _ = await post(url)

    assert (status, body) == (200, b"".join(TOKENS))
    (first,), (second,) = prefill.seen, decode.seen
    assert first.body == {
        "model": "m",
        "prompt": [5, 6, 7],
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert second.body == BODY | {"kv_transfer_params": prefill._prefilled(first)["kv_transfer_params"]}
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert re.fullmatch("kvt-[0-9a-f]{32}", first.headers["x-request-id"])
    expected = ["received", "decided", "prefill_sent", "prefill_returned", "decode_sent", "first_token", "done"]
    assert stamps.order() == expected
    assert {stamp.request for stamp in stamps.all} == {first.headers["x-request-id"]}
    assert stamps.named("prefill_returned")[0].b == 1
    assert stamps.named("done")[0].b == 3


async def test_push_sends_both_legs_before_either_answers(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")
    prefill.gate.clear()
    decode.gate.clear()

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        request = asyncio.create_task(post(url))
        await until(lambda: prefill.seen and decode.seen)
        prefill.gate.set()
        await stamps.wait_for("prefill_returned")
        decode.gate.set()
        status, body, _ = await request

    assert (status, body) == (200, b"".join(TOKENS))
    minted = prefill.seen[0].headers["x-request-id"]
    assert decode.seen[0].headers["x-request-id"] == minted
    assert decode.seen[0].body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p0",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_num_tokens": 3,
        "remote_request_id": f"cmpl-{minted}-0",
    }
    assert "transfer_id" not in prefill.seen[0].body["kv_transfer_params"]


async def test_push_learns_where_p_is_from_its_first_reply(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(Mode.PUSH, [prefill], [decode], told=False) as url:
        await post(url)
        learned = stamps.order()
        stamps.all.clear()
        await post(url)

    assert learned.index("prefill_returned") < learned.index("decode_sent")
    assert stamps.order().index("decode_sent") < stamps.order().index("prefill_returned")
    assert [seen.body["kv_transfer_params"]["remote_engine_id"] for seen in decode.seen] == ["p0", "p0"]


async def test_push_tells_d_anew_when_p_has_restarted_under_another_name(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")
    decode.gate.clear()

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        prefill.name = "p0-again"
        request = asyncio.create_task(post(url))
        await until(lambda: len(decode.seen) == 2)
        decode.gate.set()
        status, body, _ = await request

    assert (status, body) == (200, b"".join(TOKENS))
    assert decode.seen[0].disconnected
    assert [seen.body["kv_transfer_params"]["remote_engine_id"] for seen in decode.seen] == ["p0", "p0-again"]


async def test_push_waits_for_no_kv_that_p_does_not_keep(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0", hand_over=False), EngineDouble("d0")
    decode.gate.clear()

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        request = asyncio.create_task(post(url))
        await until(lambda: len(decode.seen) == 2)
        decode.gate.set()
        status, _, _ = await request

    assert status == 200
    assert "kv_transfer_params" not in decode.seen[1].body


async def test_pull_without_a_hand_off_goes_on_to_d_and_says_so(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0", hand_over=False), EngineDouble("d0")

    async with routing(Mode.PULL, [prefill], [decode]) as url:
        status, body, _ = await post(url)

    assert (status, body) == (200, b"".join(TOKENS))
    assert decode.seen[0].body == BODY
    assert stamps.named("prefill_returned")[0].b == 0


@pytest.mark.parametrize(
    ("mode", "extra"),
    [
        (Mode.PULL, {"n": 2}),
        (Mode.PULL, {"prompt": ["a", "b"]}),
        (Mode.PULL, {"use_beam_search": True}),
        (Mode.PUSH, {"prompt_logprobs": 0}),
        (Mode.PUSH, {"echo": True, "logprobs": 1}),
    ],
)
async def test_what_cannot_be_handed_over_is_served_by_d_alone(
    stamps: Stamps, mode: Mode, extra: dict[str, Any]
) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")

    async with routing(mode, [prefill], [decode]) as url:
        status, _, _ = await post(url, BODY | extra)

    assert status == 200
    assert prefill.seen == []
    assert decode.seen[0].body == BODY | extra
    assert stamps.named("decided")[0].ref == "local"
    assert stamps.named("decided")[0].a == -1


@pytest.mark.parametrize(
    ("release", "transfer_id", "carried"),
    [("0.33.0", "auto", False), ("0.34.0", "auto", True), ("0.32.0", "on", True), ("0.34.1", "off", False)],
)
async def test_transfer_id_goes_to_both_legs_where_the_release_takes_it(
    stamps: Stamps, release: str, transfer_id: str, carried: bool
) -> None:
    prefill, decode = EngineDouble("p0", release=release), EngineDouble("d0", release=release)

    async with routing(Mode.PUSH, [prefill], [decode], transfer_id=TransferId(transfer_id)) as url:
        await asyncio.sleep(0.2)
        await post(url)

    minted = prefill.seen[0].headers["x-request-id"]
    legs = [engine.seen[0].body["kv_transfer_params"].get("transfer_id") for engine in (prefill, decode)]
    assert legs == ([minted] * 2 if carried else [None] * 2)


async def test_chat_caps_the_prefill_leg_under_every_name(stamps: Stamps) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0")
    body = {
        "messages": [{"role": "user", "content": "ü"}],
        "max_completion_tokens": 9,
        "min_tokens": 4,
        "logprobs": True,
    }

    async with routing(Mode.PUSH, [prefill], [decode]) as url:
        status, answer, _ = await post(url, body, "/v1/chat/completions")

    assert (status, answer) == (200, decode.plain)
    sent = prefill.seen[0].body
    assert (sent["max_tokens"], sent["max_completion_tokens"], sent["min_tokens"]) == (1, 1, 1)
    assert "logprobs" not in sent
    told = decode.seen[0].body.pop("kv_transfer_params")
    assert decode.seen[0].body == body
    assert told["remote_request_id"].startswith("chatcmpl-kvt-")
    assert "remote_num_tokens" not in told
    assert stamps.named("first_token") == []


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
    decode.gate.clear()

    async with routing(mode, [prefill], [decode]) as url:
        status, body, headers = await post(url, BODY | {"stream": stream})

    assert (status, body) == (422, prefill.error)
    assert (headers["content-type"], headers["x-engine"]) == ("application/json", "p0")
    assert all(seen.disconnected for seen in decode.seen)
    assert len(decode.seen) == (1 if mode is Mode.PUSH else 0)
    assert stamps.named("failed")[0].ref == "prefill: 422"


@BOTH
async def test_an_error_of_d_is_passed_on_whole_and_p_is_let_go(stamps: Stamps, mode: Mode) -> None:
    prefill, decode = EngineDouble("p0"), EngineDouble("d0", status=503)
    if mode is Mode.PUSH:
        prefill.gate.clear()

    async with routing(mode, [prefill], [decode]) as url:
        status, body, headers = await post(url)

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

    async with routing(mode, [prefill], [decode]) as url:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(url + "/v1/completions", json=BODY))
            await stamps.wait_for({"prefill": "prefill_sent", "decode": "decode_sent", "stream": "first_token"}[stuck])
            await asyncio.sleep(0.05)
            request.cancel()
        await stamps.wait_for("cancelled")
        await until(lambda: all(seen.disconnected for seen in decode.seen))

    assert (len(prefill.seen), len(decode.seen)) == (1, 0 if (mode, stuck) == (Mode.PULL, "prefill") else 1)
    assert stamps.order()[-1] == "cancelled"
    assert stamps.named("done") == stamps.named("failed") == []
    if stuck == "prefill":
        assert prefill.seen[0].disconnected


async def test_answers_that_are_not_streamed_pass_through_with_their_headers(stamps: Stamps) -> None:
    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        status, body, headers = await post(url, BODY | {"stream": False})

    assert (status, body) == (200, b'{"choices": [{"text": "whole"}]}')
    assert headers["content-length"] == str(len(body))
    assert headers["content-type"] == JSON[0][1].decode()
    assert stamps.named("first_token") == []
    assert stamps.named("done")[0].a == 200


@BOTH
async def test_two_hundred_requests_at_once_keep_their_own_answers(stamps: Stamps, mode: Mode) -> None:
    prefills, decodes = [EngineDouble("p0"), EngineDouble("p1")], [EngineDouble("d0"), EngineDouble("d1")]

    async with routing(mode, prefills, decodes, max_connections=16) as url:
        answers = await asyncio.gather(*(post(url, BODY | {"prompt": [number]}) for number in range(200)))

    minted = [headers["X-Kvtrace-Request-Id"] for _, _, headers in answers]
    assert {(status, body) for status, body, _ in answers} == {(200, b"".join(TOKENS))}
    assert len(set(minted)) == 200
    assert [len(engine.seen) for engine in (*prefills, *decodes)] == [100] * 4
    assert len(stamps.named("done")) == 200
    for legs in (prefills, decodes):
        prompts = {seen.headers["x-request-id"]: seen.body["prompt"] for engine in legs for seen in engine.seen}
        assert prompts == dict(zip(minted, ([number] for number in range(200)), strict=True))
