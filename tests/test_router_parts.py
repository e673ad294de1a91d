"""The router's parts by themselves: content in streams, ids, leg bodies, round robin, addresses."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace.errors import KvtraceError, UsageError
from kvtrace.router import upstream
from kvtrace.router.bodies import RequestBody
from kvtrace.router.config import Coordinates, EngineAddress, Mode, RouterConfig
from kvtrace.router.headers import to_engine
from kvtrace.router.identity import alias, mint
from kvtrace.router.policy import Candidate, Candidates, Question, RoundRobin
from kvtrace.router.sse import ContentCounter

STREAM = (
    b": comment\r\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    b'data:{"choices":[{"text":""},{"text":"a"}]}\n\n'
    b'event: x\ndata: {"choices":[{"delta":{"reasoning":"b"}}]}\n\n'
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    b"data: not json\n\ndata: [1]\n\ndata: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_content_is_counted_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    counter = ContentCounter()
    edges = [0, *sorted(cuts), len(STREAM)]

    counts = [counter.feed(STREAM[start:end]) for start, end in itertools.pairwise(edges)]

    assert sum(counts) == counter.content_count == 3
    assert not counter.error_seen


@pytest.mark.parametrize(
    "event", [b"{}", b'{"choices":null}', b'{"choices":[1]}', b'{"choices":[{"delta":null}]}', b"1"]
)
def test_what_is_no_chunk_is_no_content(event: bytes) -> None:
    assert ContentCounter().feed(b"data: " + event + b"\n\n") == 0


def test_a_token_whose_text_is_held_back_is_content_where_its_id_is_sent() -> None:
    counter = ContentCounter()

    assert counter.feed(b'data: {"choices":[{"text":"","token_ids":[7]}]}\n') == 1
    assert counter.feed(b'data: {"choices":[{"text":"","token_ids":[]}]}\n') == 0


def test_an_endless_line_is_not_kept_and_the_next_one_counts() -> None:
    counter = ContentCounter()
    for _ in range(10):
        counter.feed(b"x" * (1 << 20))
        assert len(counter._rest) <= 4 << 20

    assert counter.feed(b'tail\ndata: {"choices":[{"text":"a"}]}\n') == 1


@given(st.binary(max_size=400))
def test_any_id_becomes_a_printable_alias_that_fits_a_header(sent: bytes) -> None:
    kept = alias([(b"x-request-id", sent)])

    assert len(kept) <= 256
    assert kept.isprintable()
    assert not {0x0A, 0x0D, 0x00} & set(kept.encode())


def test_minted_ids_are_alike_in_shape_only() -> None:
    ids = {mint() for _ in range(1_000)}

    assert len(ids) == 1_000
    assert {len(minted) for minted in ids} == {36}


def test_headers_that_cannot_be_written_cleanly_stay_behind() -> None:
    sent = [(b"X-Good", b"1"), (b"x-latin", b"\xff"), (b"x-control", b"a\x0bb"), (b"Host", b"h"), (b"TE", b"trailers")]

    assert to_engine(sent) == [("x-good", "1")]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("text", None), ([1, 2, 3], 3), ([[1, 2], [3]], 3), (["a"], None), ([], 0), (None, None), ([1, "a"], None)],
)
def test_prompt_tokens_are_known_where_they_were_sent(prompt: Any, tokens: int | None) -> None:
    assert RequestBody(json.dumps({"prompt": prompt}).encode()).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"prompt": [1, 2]}, ""),
        ({"prompt": ["a"]}, ""),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"n": 1}, ""),
        ({"n": 2}, "several answers"),
        ({"best_of": 3}, "several answers"),
        ({"echo": True}, ""),
        ({"echo": True, "logprobs": 0}, "logprobs of the prompt"),
    ],
)
def test_pull_hands_over_one_sequence_only(fields: dict[str, Any], obstacle: str) -> None:
    body = RequestBody(json.dumps(fields).encode())

    assert body.obstacle(Mode.PULL) == obstacle
    assert body.obstacle(Mode.PUSH) == (obstacle if "logprobs" in obstacle else "")


@pytest.mark.parametrize(("asked", "sent"), [(0, 0), (1, 1), (7, 1), ("x", 0), (None, 0)])
def test_min_tokens_never_exceed_the_one_that_p_makes(asked: Any, sent: int) -> None:
    body = RequestBody(json.dumps({"min_tokens": asked}).encode())

    assert json.loads(body.prefill(chat=False))["min_tokens"] == sent


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 3), (2, 2), (2, 3), (4, 6)])
def test_round_robin_is_even_and_meets_every_pair(prefills: int, decodes: int) -> None:
    candidates = Candidates(
        tuple(Candidate(index, "", 0, 0) for index in range(prefills)),
        tuple(Candidate(index, "", 0, 0) for index in range(decodes)),
    )
    policy, question = RoundRobin(), Question("kvt-1", "/v1/completions", 0, None)

    chosen = [policy.choose(question, candidates) for _ in range(prefills * decodes)]

    assert sorted((choice.prefill, choice.decode) for choice in chosen) == [
        (prefill, decode) for prefill in range(prefills) for decode in range(decodes)
    ]
    assert [choice.prefill for choice in chosen[:prefills]] == list(range(prefills))


def test_an_address_may_name_the_side_channel() -> None:
    plain = EngineAddress.parse("localhost:8100/")
    named = EngineAddress.parse("https://p:1, engine_id=e0 ,host=10.0.0.1,port=5600,tp=2")

    assert plain == EngineAddress("http://localhost:8100")
    assert named == EngineAddress("https://p:1", Coordinates("e0", "10.0.0.1", 5600, tp_size=2))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://x",
        "http://[::1",
        "http://x:0",
        "http://x:65536",
        "http://x:y",
        "http://x?q=1",
        "http://x,engine_id=e",
        "http://x,engine_id=e,host=h,port=no",
        "http://x,engine_id=e,host=h,port=0",
        "http://x,engine_id=e,host=h,port=5600,tp=0",
        "http://x,a=b",
    ],
)
def test_an_address_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"engine address|unknown|missing|whole numbers"):
        EngineAddress.parse(text)


def test_an_address_with_a_password_is_refused_without_saying_it() -> None:
    with pytest.raises(UsageError, match="no password") as caught:
        EngineAddress.parse("http://me:secret@x:1")

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "is_usage"),
    [({"grace_s": math.inf}, True), ({"grace_s": math.nan}, True), ({"port_file": Path("/nowhere/port")}, False)],
)
def test_what_would_fail_once_it_serves_is_refused_before(wrong: dict[str, Any], is_usage: bool) -> None:
    with pytest.raises(KvtraceError, match=r"number of seconds|/nowhere/port cannot be written") as caught:
        RouterConfig(Mode.PULL, (EngineAddress("http://p"),), (EngineAddress("http://d"),), **wrong)

    assert isinstance(caught.value, UsageError) == is_usage


@pytest.mark.parametrize("message", ["Bad status line:\n  Expected HTTP/:\n\n  b'words'", "Bad status line 'words'"])
def test_what_a_parser_quotes_of_a_reply_is_left_out(message: str) -> None:
    """There is one in C, and one in Python for where that is not to be had."""
    error = aiohttp.ClientResponseError(cast("Any", None), (), message=message)

    assert upstream._reason(error) == "it is no HTTP (Bad status line)"


def test_a_router_needs_both_sides() -> None:
    with pytest.raises(UsageError, match="at least one prefill and one decode"):
        RouterConfig(Mode.PULL, (EngineAddress("http://p"),), ())
