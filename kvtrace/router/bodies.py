"""The bodies of the two legs, made from the client's without reading or rewriting the prompt."""

from __future__ import annotations

from typing import Any

import msgspec

from kvtrace.router.config import Mode

_PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
_NOBODY_YET = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
# What P's leg goes without: it answers the router, with one token that nobody looks at.
_DECODE_ONLY = ("stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo")
_KV = "kv_transfer_params"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tokens = msgspec.json.Decoder(list[int | list[int]])
_prompts = msgspec.json.Decoder(list[msgspec.Raw])
_value = msgspec.json.Decoder()
_dump = msgspec.json.encode


class BodyError(Exception):
    """A body that no leg can be made from; its text goes to the client."""


class RequestBody:
    """A completion or chat request: what the router needs to know of it, and the body of each leg."""

    def __init__(self, raw: bytes) -> None:
        try:
            # Every value stays as the client wrote it; only those below that are asked for are ever decoded.
            self._fields = _fields.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BodyError(f"the body is no JSON object: {error}") from error
        # Engines connect to whatever these name, so they are the router's to write and not a client's.
        self._fields.pop(_KV, None)
        self.prompt_tokens = self._token_count()
        """Length of the prompt, or of all prompts, where sent as token ids, else None."""

    def obstacle(self, mode: Mode) -> str:
        """Return why this request cannot be handed from P to D and D has to serve it alone; "" if it can be."""
        ask = self._ask
        if ask("use_beam_search"):
            return "beam search"
        if ask("prompt_logprobs") is not None or (ask("echo") and ask("logprobs") is not None):
            return "logprobs of the prompt"
        if mode is Mode.PUSH:
            return ""
        # P's reply names the blocks of one sequence, which are given up after one read.
        if self._has_several_prompts():
            return "several prompts"
        return "several answers" if any(_above_one(ask(name)) for name in ("n", "best_of")) else ""

    def prefill(self, *, chat: bool, transfer_id: str = "") -> bytes:
        """Return the body of the prefill leg: one token, whose KV stays on P for D."""
        leg: dict[str, Any] = {name: value for name, value in self._fields.items() if name not in _DECODE_ONLY}
        leg |= {"stream": False, "max_tokens": 1}
        if chat:
            leg["max_completion_tokens"] = 1
        if "min_tokens" in leg:
            leg["min_tokens"] = int(_above_one(self._ask("min_tokens")) or self._ask("min_tokens") == 1)
        leg[_KV] = _PREFILL_ONLY | _NOBODY_YET | ({"transfer_id": transfer_id} if transfer_id else {})
        return _dump(leg)

    def decode(self, params: dict[str, Any] | None) -> bytes:
        """Return the body of the decode leg: the client's own, with P's hand-off where there is one."""
        return _dump(self._fields if params is None else {**self._fields, _KV: params})

    def _ask(self, name: str) -> Any:
        """Return a small field's value, None if it is not there."""
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            return _value.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None

    def _token_count(self) -> int | None:
        raw = self._fields.get("prompt")
        if raw is None or bytes(memoryview(raw)[:1]) != b"[":
            return None
        try:
            prompt: list[Any] = _tokens.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        kinds = set(map(type, prompt))
        if list not in kinds:
            return len(prompt)
        return sum(map(len, prompt)) if kinds == {list} else None

    def _has_several_prompts(self) -> bool:
        raw = self._fields.get("prompt")
        if raw is None:
            return False
        try:
            prompts = _prompts.decode(raw)
        except msgspec.DecodeError:
            return False
        return len(prompts) > 1 and not bytes(prompts[0]).isdigit()


def _above_one(value: object) -> bool:
    return type(value) is int and value > 1
