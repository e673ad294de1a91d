"""A completion asked of the router, in either order of dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from kvtrace.router.config import Mode

BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}


BOTH = pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])


async def post(
    url: str, body: dict[str, Any] | None = None, path: str = "/v1/completions"
) -> tuple[int, bytes, Mapping[str, str]]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body or BODY) as reply:
        return reply.status, await reply.read(), reply.headers
