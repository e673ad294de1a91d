"""What a client of the router may send and gets: streams, limits, odd bodies, other paths, health, a policy."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvtrace import emit
from kvtrace.router.config import Mode
from kvtrace.router.policy import Candidates, Decision, Question
from tests.router_client import BODY, posted, raw, send
from tests.router_doubles import ROLE, WORD, EngineDouble, Stamps, refused_url, routing, until


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    return Stamps.installed(monkeypatch)


async def test_a_role_is_no_first_token_and_cuts_anywhere_change_nothing(stamps: Stamps) -> None:
    whole = ROLE + WORD + WORD + b"data: [DONE]\n\n"
    cuts = [whole[start : start + 7] for start in range(0, len(whole), 7)]
    decode = EngineDouble("d0", chunks=cuts)
    decode.pauses_before = (len(ROLE) + 20) // 7

    async with routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url:
        request = asyncio.create_task(send(url, path="/v1/chat/completions"))
        await until(lambda: decode.paused)
        await asyncio.sleep(0.05)
        early = list(stamps.order())
        decode.gate.set()
        status, body, _ = await request

    assert (status, body) == (200, whole)
    assert early[-1] == "decode_sent"
    assert stamps.order()[-2:] == ["first_token", "done"]
    assert stamps.named("done")[0].b == 2


async def test_bytes_pass_as_they_come_and_not_when_the_answer_is_whole(stamps: Stamps) -> None:
    decode = EngineDouble("d0", chunks=[WORD, WORD])
    decode.pauses_before = 1

    async with (
        routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", data=BODY) as reply,
    ):
        first = await reply.content.readany()
        await until(lambda: decode.paused)
        decode.gate.set()
        rest = await reply.read()

    assert (first, rest) == (WORD, WORD)


async def test_a_client_that_leaves_at_the_end_mark_has_its_answer(stamps: Stamps) -> None:
    decode = EngineDouble("d0", chunks=[WORD, b"data: [DONE]\n\n", b"\n"])
    decode.pauses_before = 2

    async with routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url:
        reader, writer = await raw(url, posted(BODY))
        await reader.readuntil(b"[DONE]")
        writer.close()
        await asyncio.sleep(0.1)
        decode.gate.set()
        await stamps.wait_for("done")
        await asyncio.sleep(0.1)

    assert stamps.order()[-2:] == ["first_token", "done"]


async def test_a_slow_client_holds_the_engine_back(stamps: Stamps) -> None:
    decode = EngineDouble("d0", chunks=[b"data: " + b"x" * 65_530 for _ in range(2_000)])

    async with routing(Mode.PULL, [EngineDouble("p0")], [decode]) as url:
        reader, writer = await raw(url, posted(BODY))
        await reader.read(1)
        await until(lambda: decode.chunks_sent)
        sent, looks = 0, 0
        while looks < 10:  # at which nothing more had been sent
            await asyncio.sleep(0.05)
            looks = looks + 1 if decode.chunks_sent == sent else 0
            sent = decode.chunks_sent
        writer.close()
        await stamps.wait_for("cancelled")

    assert 0 < sent < 1_000


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"a": NaN}', b'{"a":' + b"[" * 100_000, b"\xff"])
async def test_a_body_that_is_no_object_is_a_400_in_openais_shape(stamps: Stamps, body: bytes) -> None:
    prefill = EngineDouble("p0")

    async with routing(Mode.PULL, [prefill], [EngineDouble("d0")]) as url:
        status, answer, headers = await send(url, body)

    error = json.loads(answer)["error"]
    assert (status, error["type"], error["code"]) == (400, "BadRequestError", "invalid_body")
    assert headers["X-Kvtrace-Request-Id"] == stamps.named("failed")[0].request
    assert prefill.seen == []


async def test_a_body_over_the_limit_is_a_413_and_one_at_the_limit_is_served(stamps: Stamps) -> None:
    prompt = b'{"prompt": "%s", "stream": true}'

    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")], max_body_bytes=2_000) as url:
        room = 2_000 - len(prompt % b"")
        fits, _, _ = await send(url, prompt % (b"a" * room))
        over, answer, _ = await send(url, prompt % (b"a" * (room + 1)))

    assert (fits, over) == (200, 413)
    assert json.loads(answer)["error"]["code"] == "request_too_large"
    assert [stamp.a for stamp in stamps.named("failed")] == [413]


async def test_numbers_and_escapes_reach_the_engines_as_the_client_wrote_them(stamps: Stamps) -> None:
    decode = EngineDouble("d0")
    received: list[bytes] = []
    decode.raw = received

    async with routing(Mode.PULL, [EngineDouble("p0", hand_over=False)], [decode]) as url:
        await send(url, b'{"prompt": "\\u00fc", "temperature": 0.10, "seed": 123456789012345678901234567890}')

    assert received == [b'{"prompt":"\\u00fc","temperature":0.10,"seed":123456789012345678901234567890}']


async def test_a_client_that_leaves_while_sending_its_body_is_cancelled(stamps: Stamps) -> None:
    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        _, writer = await raw(url, posted(BODY)[:-5])
        await asyncio.sleep(0.1)
        writer.close()
        await stamps.wait_for("cancelled")

    assert stamps.order() == ["received", "cancelled"]


async def test_other_paths_and_methods_are_clear_errors(stamps: Stamps) -> None:
    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        missing = await send(url, path="/v1/embeddings")
        wrong = await send(url, b"", method="GET")

    for (status, body, _), expected in ((missing, (404, "NotFoundError")), (wrong, (405, "MethodNotAllowedError"))):
        assert (status, json.loads(body)["error"]["type"]) == expected
    assert stamps.all == []


async def test_models_are_those_of_every_decode_engine_once(stamps: Stamps) -> None:
    decodes = [EngineDouble("m1"), EngineDouble("m2"), EngineDouble("m1"), EngineDouble("m3", url=refused_url())]

    async with routing(Mode.PULL, [EngineDouble("p0")], decodes) as url:
        status, body, _ = await send(url, b"", "/v1/models", "GET")

    assert status == 200
    assert [model["id"] for model in json.loads(body)["data"]] == ["m1", "m2"]


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ((), (200, "ok")),
        (("p0",), (200, "degraded")),
        (("p0", "p1"), (503, "unavailable")),
        (("d0",), (503, "unavailable")),
    ],
)
async def test_health_needs_one_engine_of_each_side(
    stamps: Stamps, dead: tuple[str, ...], expected: tuple[int, str]
) -> None:
    engines = {name: EngineDouble(name, url=refused_url() if name in dead else "") for name in ("p0", "p1", "d0")}

    async with routing(Mode.PULL, [engines["p0"], engines["p1"]], [engines["d0"]]) as url:
        status, body, _ = await send(url, b"", "/health", "GET")

    told = json.loads(body)
    assert (status, told["status"]) == expected
    assert [engine["healthy"] for engine in told["engines"]] == [name not in dead for name in engines]


async def test_version_names_the_engines_releases(stamps: Stamps) -> None:
    engines = [EngineDouble("p0", release="0.31.0"), EngineDouble("d0", release="0.32.0")]

    async with routing(Mode.PULL, engines[:1], engines[1:]) as url:
        _, body, _ = await send(url, b"", "/version", "GET")

    assert json.loads(body)["version"] == "0.31.0, 0.32.0"


async def test_a_policy_is_told_every_queue_and_its_choice_is_kept(stamps: Stamps) -> None:
    prefills, decodes = [EngineDouble("p0"), EngineDouble("p1")], [EngineDouble("d0"), EngineDouble("d1")]
    prefills[1].gate.clear()
    asked: list[tuple[Question, Candidates]] = []

    class Last:
        def choose(self, request: Question, candidates: Candidates) -> Decision:
            asked.append((request, candidates))
            return Decision(1, 0)

    async with routing(Mode.PULL, prefills, decodes, policy=Last()) as url:
        first = asyncio.create_task(send(url, b'{"prompt": [1, 2, 3]}'))
        await stamps.wait_for("prefill_sent")
        second = asyncio.create_task(send(url))
        await until(lambda: len(stamps.named("prefill_sent")) == 2)
        prefills[1].gate.set()
        await asyncio.gather(first, second)
        await send(url)

    assert [len(engine.seen) for engine in (*prefills, *decodes)] == [0, 3, 3, 0]
    assert asked[0][0].prompt_tokens == 3
    queues = [
        [(candidate.inflight, candidate.tokens) for candidate in (*seen.prefill, *seen.decode)] for _, seen in asked
    ]
    assert queues == [[(0, 0)] * 4, [(0, 0), (1, 3), (1, 3), (0, 0)], [(0, 0)] * 4]
    told = [stamp for stamp in stamps.named("candidate") if stamp.request == stamps.named("decided")[1].request]
    assert [(stamp.a, stamp.b, stamp.c, stamp.d) for stamp in told] == [
        (0, 0, 0, 0),
        (0, 1, 1, 3),
        (1, 0, 1, 3),
        (1, 1, 0, 0),
    ]
    assert told[1].ref == prefills[1].url
    decided = stamps.named("decided")[1]
    assert (decided.a, decided.b, decided.c, decided.d, decided.ref) == (1, 0, 1, 1, "pull")


async def test_a_policy_that_raises_is_a_500_and_the_router_goes_on(stamps: Stamps) -> None:
    class Broken:
        def choose(self, request: Question, candidates: Candidates) -> Decision:
            raise ZeroDivisionError

    async with routing(Mode.PULL, [EngineDouble("p0")], [EngineDouble("d0")], policy=Broken()) as url:
        answers = [await send(url) for _ in range(2)]

    assert [(status, json.loads(body)["error"]["code"]) for status, body, _ in answers] == [(500, "router_failed")] * 2


async def test_without_a_spool_the_router_serves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "tracer", emit.NullEmitter)

    async with routing(Mode.PUSH, [EngineDouble("p0")], [EngineDouble("d0")]) as url:
        status, _, _ = await send(url)

    assert status == 200


def test_facts_name_the_process(stamps: Stamps) -> None:
    from kvtrace.router.app import create_app
    from kvtrace.router.config import EngineAddress, RouterConfig

    create_app(RouterConfig(Mode.PUSH, (EngineAddress("http://p"),), (EngineAddress("http://d"),)))

    assert (stamps.facts["kind"], stamps.facts["mode"]) == ("router", "push")


@pytest.mark.parametrize("value", [{"a": 1}, None, 3])
async def test_fields_of_the_wrong_kind_are_the_engines_to_judge(stamps: Stamps, value: Any) -> None:
    decode = EngineDouble("d0")
    odd = dict.fromkeys(("n", "min_tokens", "prompt", "prompt_logprobs", "logprobs"), value)

    async with routing(Mode.PUSH, [EngineDouble("p0")], [decode]) as url:
        status, _, _ = await send(url, json.dumps(odd).encode())

    assert status == 200
    decode.seen[0].body.pop("kv_transfer_params", None)
    assert decode.seen[0].body == odd
