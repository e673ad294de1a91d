"""The two orders of dispatch, against engines that are doubles."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from kvtrace.router.config import Mode, TransferId
from tests.dispatched import BODY, BOTH, post
from tests.router_client import send
from tests.router_doubles import JSON, TOKENS, EngineDouble, Stamps, routing, until


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    return Stamps.installed(monkeypatch)


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
        if transfer_id == "auto":
            await until(lambda: "/version" in prefill.looked_up and "/version" in decode.looked_up)
            await send(url, b"", "/version", "GET")  # which takes the router longer than to read those answers
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
