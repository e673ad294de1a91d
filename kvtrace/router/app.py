"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from kvtrace import emit
from kvtrace.router.config import Mode, RouterConfig, TransferId
from kvtrace.router.dispatch import Dispatcher
from kvtrace.router.forward import Forward
from kvtrace.router.overview import Overview
from kvtrace.router.policy import Policy, RoundRobin
from kvtrace.router.replies import Refusal
from kvtrace.router.upstream import DECODE, PREFILL, Client, Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

FORWARDED = ("/v1/completions", "/v1/chat/completions")
_GREET_EVERY_S = 2.0


def create_app(config: RouterConfig, policy: Policy | None = None) -> Starlette:
    """Return the router for `config`; `policy` chooses P and D, round robin by default."""
    prefill = tuple(Engine(PREFILL, index, address) for index, address in enumerate(config.prefill))
    decode = tuple(Engine(DECODE, index, address) for index, address in enumerate(config.decode))
    client = Client(config)
    overview = Overview(client, prefill, decode)
    forward = Forward(config, policy or RoundRobin(), prefill, decode, Dispatcher(config, client))
    asks_release = config.mode is Mode.PUSH and config.transfer_id is TransferId.AUTO

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await client.open()
        engines = (*prefill, *decode) if asks_release else ()
        greetings = [asyncio.create_task(overview.greet(engine, _GREET_EVERY_S)) for engine in engines]
        try:
            yield
        finally:
            for greeting in greetings:
                greeting.cancel()
            await client.close()

    routes = [
        *(Route(path, forward, methods=["POST"]) for path in FORWARDED),
        Route("/v1/models", overview.models),
        Route("/health", overview.health),
        Route("/version", overview.version),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _not_found, 405: _not_allowed})
    app.router.redirect_slashes = False
    _introduce(config)
    return app


def _introduce(config: RouterConfig) -> None:
    tracer = emit.tracer()
    tracer.fact("kind", "router")
    tracer.fact("mode", config.mode.value)
    tracer.fact("argv0", sys.argv[0])


async def _not_found(request: Request, _: Exception) -> Response:
    served = ", ".join((*FORWARDED, "/v1/models", "/health", "/version"))
    return _response(Refusal.own(404, f"{request.url.path} is not served here; {served} are", "not_found"))


async def _not_allowed(request: Request, _: Exception) -> Response:
    message = f"{request.url.path} does not take {request.method}"
    return _response(Refusal.own(405, message, "method_not_allowed"))


def _response(refusal: Refusal) -> Response:
    return Response(refusal.body, refusal.status, media_type="application/json")
