"""What the router says about itself and its engines: health, release, models."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from kvtrace import __version__
from kvtrace.router.headers import to_engine
from kvtrace.router.replies import Refusal
from kvtrace.router.upstream import LegError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from kvtrace.router.headers import LegHeaders
    from kvtrace.router.upstream import Client, Engine

_TIMEOUT_S = 5.0
_BYTES_MAX = 8 << 20


class Overview:
    """The endpoints that ask every engine and answer once."""

    def __init__(self, client: Client, prefill: Sequence[Engine], decode: Sequence[Engine]) -> None:
        self._client = client
        self._prefill = prefill
        self._decode = decode

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Answer 200 while some P and some D answer theirs, else 503; the body lists every engine."""
        engines = (*self._prefill, *self._decode)
        answers = await asyncio.gather(*(self._ask(engine, "/health") for engine in engines))
        healthy = {engine for engine, (status, _) in zip(engines, answers, strict=True) if 200 <= status < 300}
        serving = not healthy.isdisjoint(self._prefill) and not healthy.isdisjoint(self._decode)
        status = "unavailable" if not serving else "ok" if len(healthy) == len(engines) else "degraded"
        listed = [
            {"leg": engine.leg, "url": engine.url, "healthy": engine in healthy, "inflight": engine.inflight}
            for engine in engines
        ]
        return JSONResponse({"status": status, "engines": listed}, 200 if serving else 503)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """Answer the engines' release as vLLM would, all of them if they differ, and kvtrace's own."""
        engines = (*self._prefill, *self._decode)
        answers = await asyncio.gather(*(self._ask(engine, "/version") for engine in engines))
        releases = sorted({str(_field(body, "version")) for status, body in answers if status == 200})
        return JSONResponse({"version": ", ".join(releases) or "unknown", "kvtrace": __version__})

    async def models(self, request: Request) -> Response:
        """Answer the models of every D that answers, each named once; an engine's own error if none does."""
        headers = to_engine(request.scope["headers"])
        answers = await asyncio.gather(*(self._ask(engine, "/v1/models", headers) for engine in self._decode))
        models: dict[str, Any] = {}
        for status, body in answers:
            listed = _field(body, "data") if status == 200 else None
            for model in listed if isinstance(listed, list) else ():
                if isinstance(model, dict):
                    models.setdefault(str(model.get("id")), model)
        if models:
            return JSONResponse({"object": "list", "data": list(models.values())})
        for status, body in answers:
            if status:
                return Response(body, status, media_type="application/json")
        refusal = Refusal.own(502, "no decode engine can be reached", "decode_unreachable")
        return Response(refusal.body, refusal.status, media_type="application/json")

    async def greet(self, engine: Engine, every_s: float) -> None:
        """Ask `engine` for its release until it says it."""
        while engine.release is None:
            status, body = await self._ask(engine, "/version")
            if status == 200:
                engine.learn_release(str(_field(body, "version")))
                return
            await asyncio.sleep(every_s)

    async def _ask(self, engine: Engine, path: str, headers: LegHeaders | None = None) -> tuple[int, bytes]:
        """Return status and body, or 0 and nothing if the engine cannot be reached."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reply = await self._client.get(engine, path, headers)
                try:
                    return reply.status, await reply.body(_BYTES_MAX)
                finally:
                    reply.close()
        except (LegError, TimeoutError):
            return 0, b""


def _field(body: bytes, name: str) -> Any:
    try:
        return json.loads(body).get(name)
    except (ValueError, AttributeError):
        return None
