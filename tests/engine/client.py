"""A client of a few lines, so that little of the time it measures is its own."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

TIMEOUT_S = 60.0


class Client:
    """Sends completions one at a time, each on a connection of its own that is made before its time begins."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)

    def ttft_ms(self, identity: str, **body: Any) -> float:
        """Send a streamed request and read its whole answer; return the time to the first content, ms."""
        data = json.dumps(body | {"stream": True}).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": identity}
        self._connection.close()
        self._connection.connect()
        began_s = time.monotonic()
        self._connection.request("POST", "/v1/completions", data, headers)
        reply = self._connection.getresponse()
        assert reply.status == 200, reply.read()
        first_s = 0.0
        for line in reply:
            arrived_s = time.monotonic()
            if not first_s and line.startswith(b"data: {") and _has_text(line):
                first_s = arrived_s
        self._connection.close()
        assert first_s, f"{identity} was answered without a token"
        return (first_s - began_s) * 1000


def _has_text(line: bytes) -> bool:
    event = json.loads(line.removeprefix(b"data: "))
    assert "choices" in event, f"the stream says {event}"
    return bool(event["choices"][0]["text"])
