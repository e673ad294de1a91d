"""The bodies of the two legs, made from the client's."""

from __future__ import annotations

import json
from typing import Any

from kvtrace.router.config import Mode

_PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
_NOBODY_YET = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
# What the legs disagree on. All else, the prompt above all, is written once for both.
_PER_LEG = (
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
)
_KV = "kv_transfer_params"


class BodyError(Exception):
    """A body that no leg can be made from; its text goes to the client."""


class RequestBody:
    """A completion or chat request: what the router needs to know of it, and the body of each leg."""

    def __init__(self, raw: bytes) -> None:
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BodyError(f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BodyError("the body is not a JSON object")
        # Engines connect to whatever these name, so they are the router's to write and not a client's.
        fields.pop(_KV, None)
        self._fields: dict[str, Any] = fields
        self._own = {name: fields[name] for name in _PER_LEG if name in fields}
        self._shared = _dump({name: value for name, value in fields.items() if name not in self._own})

    @property
    def prompt_tokens(self) -> int | None:
        """Return the length of the prompt where it was sent as token ids, else None."""
        prompts = self._fields.get("prompt")
        if not isinstance(prompts, list) or not prompts:
            return None
        if all(type(token) is int for token in prompts):
            return len(prompts)
        if all(isinstance(prompt, list) for prompt in prompts):
            return sum(len(prompt) for prompt in prompts)
        return None

    def obstacle(self, mode: Mode) -> str:
        """Return why this request cannot be handed from P to D and D has to serve it alone; "" if it can be."""
        ask = self._fields.get
        if ask("use_beam_search"):
            return "beam search"
        if ask("prompt_logprobs") is not None or (ask("echo") and ask("logprobs") is not None):
            return "logprobs of the prompt"
        if mode is Mode.PUSH:
            return ""
        # P's reply names the blocks of one sequence, which are given up after one read.
        prompts = ask("prompt")
        if isinstance(prompts, list) and len(prompts) > 1 and type(prompts[0]) is not int:
            return "several prompts"
        return "several answers" if any(_above_one(ask(name)) for name in ("n", "best_of")) else ""

    def prefill(self, *, chat: bool, transfer_id: str = "") -> bytes:
        """Return the body of the prefill leg: one token, whose KV stays on P for D."""
        own: dict[str, Any] = {"stream": False, "max_tokens": 1}
        if chat:
            own["max_completion_tokens"] = 1
        if "min_tokens" in self._own:
            own["min_tokens"] = min(self._own["min_tokens"], 1) if type(self._own["min_tokens"]) is int else 0
        params = _PREFILL_ONLY | _NOBODY_YET
        return self._leg(own | {_KV: params | ({"transfer_id": transfer_id} if transfer_id else {})})

    def decode(self, params: dict[str, Any] | None) -> bytes:
        """Return the body of the decode leg: the client's own, with P's hand-off where there is one."""
        return self._leg(self._own if params is None else self._own | {_KV: params})

    def _leg(self, own: dict[str, Any]) -> bytes:
        if not own:
            return self._shared
        if self._shared == b"{}":
            return _dump(own)
        return self._shared[:-1] + b"," + _dump(own)[1:]


def _above_one(value: object) -> bool:
    return type(value) is int and value > 1


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
