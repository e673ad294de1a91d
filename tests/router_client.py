"""A client of the router that sends what it is told to, byte by byte if need be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

BODY = b'{"prompt": "a", "stream": true}'


async def send(
    url: str, body: bytes = BODY, path: str = "/v1/completions", method: str = "POST", **headers: str
) -> tuple[int, bytes, Mapping[str, str]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, data=body or None, headers=named) as reply,
    ):
        return reply.status, await reply.read(), reply.headers


async def raw(url: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    return reader, writer


def posted(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
