"""The scans of a request's and a reply's body, however they are cut."""

from __future__ import annotations

from typing import Any

import pytest

from instrumented_connectors.bodies import StreamScan, TransferParamsScan, event_has_content
from tests.middleware_doubles import CHUNKS, chat, completion


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
