"""Counting content in a stream of server-sent events, without touching the stream."""

from __future__ import annotations

import json

from kvtrace import content

_LINE_BYTES_MAX = 4 << 20


class ContentCounter:
    """Reads a stream's bytes as they pass, however they are cut, and counts the events that carry content.

    Content is a non-empty text, list of token ids, message, reasoning or tool call; a chunk that only names the role
    is none, nor is one that only carries usage.
    """

    def __init__(self) -> None:
        self.content_count = 0
        self.error_seen = False
        self.end_seen = False
        """True once the mark has passed that ends a stream; many clients leave at it."""
        self._rest = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes and return how many content events they completed."""
        before = self.content_count
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if self._rest or self._skipping:
                whole, self._rest = bytes(self._rest) + line, bytearray()
                skip, self._skipping = self._skipping, False
                if skip:
                    continue
                self._take(whole)
            else:
                self._take(line)
        self._rest += rest
        if len(self._rest) > _LINE_BYTES_MAX:
            # A line this long is not held back to be looked into; it passes uncounted.
            self._rest, self._skipping = bytearray(), True
        return self.content_count - before

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        if line[5:].strip() == b"[DONE]":
            self.end_seen = True
            return
        try:
            event = json.loads(line[5:])
        except (ValueError, RecursionError):
            return
        if isinstance(event, dict):
            self.content_count += content.in_choices(event)
            self.error_seen = self.error_seen or "error" in event
