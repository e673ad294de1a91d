"""What the middleware reads from bodies as they go by: a request's leg, and a reply's first content."""

from __future__ import annotations

import json
import re
from typing import Any

from kvtrace import content


class TransferParamsScan:
    """Finds a request's `kv_transfer_params` in a body that arrives in pieces, holding a bounded part of it.

    In JSON a quote inside a string has a backslash before it, so the key with its own quotes is a key wherever
    no backslash precedes it, and a prompt that quotes these words is none. Only the key's value is parsed.
    """

    KEY = b'"kv_transfer_params"'
    LONGEST_BYTES = 1 << 20

    __slots__ = ("held", "open")

    def __init__(self) -> None:
        self.held = b""
        self.open = False  # True while `held` begins behind the key

    def feed(self, piece: bytes) -> bool | None:
        """Return True once the body is known to ask for a prefill leg, False for a decode leg, None till then."""
        self.held += piece
        while self.open or self._seek():
            text = self.held.decode("utf-8", "replace").lstrip()
            rest = text[1:].lstrip()
            if not text or (text[0] == ":" and not rest):
                return None
            if text[0] != ":":
                self.open = False
                continue
            try:
                params, _ = json.JSONDecoder().raw_decode(rest)
            except RecursionError:  # nested deeper than anything that vLLM takes
                self.held, self.open = b"", False
                return None
            except ValueError:
                if len(self.held) > self.LONGEST_BYTES:
                    self.held = b""
                    self.open = False
                return None
            self.open = False
            if isinstance(params, dict):
                if params.get("do_remote_decode"):
                    return True
                if params.get("do_remote_prefill"):
                    return False
        return None

    def _seek(self) -> bool:
        """Return True when `held` has been cut to what follows the next key, else cut it to what may begin one."""
        start = 0
        while (at := self.held.find(self.KEY, start)) >= 0:
            start = at + len(self.KEY)
            if at == 0 or self.held[at - 1 : at] != b"\\":
                self.held = self.held[start:]
                self.open = True
                return True
        self.held = self.held[-len(self.KEY) :]
        return False


class StreamScan:
    """Finds the first content in a reply of server-sent events, and counts the events that carry any."""

    # A text that is not empty under a key that carries content: exact enough to count by, a quarter of parsing's cost.
    # The quote comes first, with no lookbehind before it, so that the search can skip to it.
    CONTENT = re.compile(
        rb'"(?<!\\")(?:'
        rb'(?:text|content|reasoning|reasoning_content|refusal|arguments|thinking|partial_json|delta)"\s*:\s*"[^"]'
        rb'|token_ids"\s*:\s*\[\s*\d)'
    )
    LONGEST_BYTES = 1 << 20

    __slots__ = ("chunks", "rest")

    def __init__(self) -> None:
        self.chunks = 0
        self.rest = b""

    def feed(self, piece: bytes) -> bool:
        """Return True if this piece of the reply completes the first event that carries content."""
        before = self.chunks
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.chunks += self._has_content(line[5:].strip())
        if len(self.rest) > self.LONGEST_BYTES:
            self.rest = b""
        return before == 0 < self.chunks

    def _has_content(self, data: bytes) -> bool:
        if self.chunks:
            return self.CONTENT.search(data) is not None
        if not data.startswith(b"{"):
            return False
        try:
            return event_has_content(json.loads(data))
        except (ValueError, RecursionError):
            return False


def event_has_content(event: dict[str, Any]) -> bool:
    """Return True if a streamed event brings text, reasoning, token ids or (part of) a tool call."""
    if content.in_choices(event):
        return True
    delta = event.get("delta")
    if not str(event.get("type", "")).endswith("delta"):
        return False
    if isinstance(delta, dict):
        return any(delta.get(key) for key in ("text", "thinking", "partial_json"))
    return bool(delta)
