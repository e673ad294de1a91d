"""One client request: read, placed, attempted, answered; or cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvtrace.modes import LOCAL
from kvtrace.router.bodies import BodyError, RequestBody
from kvtrace.router.dispatch import Attempt
from kvtrace.router.headers import to_engine
from kvtrace.router.identity import alias, mint, reply_headers
from kvtrace.router.marks import Marks
from kvtrace.router.policy import Candidates, Question
from kvtrace.router.replies import ClientGoneError, ClientReply, Refusal, gone, read_body
from kvtrace.router.trace_context import carried
from kvtrace.router.upstream import LegError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from kvtrace.router.config import RouterConfig
    from kvtrace.router.dispatch import Dispatcher
    from kvtrace.router.headers import LegHeaders
    from kvtrace.router.policy import Policy
    from kvtrace.router.upstream import Engine

_log = logging.getLogger(__name__)


class Forward:
    """The ASGI endpoint for completions and chat completions."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        prefill: tuple[Engine, ...],
        decode: tuple[Engine, ...],
        dispatcher: Dispatcher,
    ) -> None:
        self._config = config
        self._policy = policy
        self._prefill = prefill
        self._decode = decode
        self._dispatcher = dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = _ClientRequest(scope, ClientReply(send))
        try:
            raw = await read_body(receive, self._config.max_body_bytes)
        except ClientGoneError:
            request.marks.received(0, 0, request.client_id, request.received_ns)
            request.marks.cancelled()
            return
        except Refusal as refusal:
            request.marks.received(0, 0, request.client_id, request.received_ns)
            await request.refuse(refusal)
            return
        except asyncio.CancelledError:
            request.marks.received(0, 0, request.client_id, request.received_ns)
            await request.stop()
            return
        await self._serve_while_wanted(request, raw, receive)

    async def _serve_while_wanted(self, request: _ClientRequest, raw: bytes, receive: Receive) -> None:
        work = asyncio.create_task(self._serve(request, raw))
        watch = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not request.reply.ended:
                work.cancel()
                await asyncio.wait({work})
                request.marks.cancelled()
                return
            # What may be left is the end of a stream whose client has gone; an engine that hangs there is given up.
            await asyncio.wait({work}, timeout=self._config.grace_s)
            if work.done():
                await work
        except asyncio.CancelledError:
            # Only the server's end cancels, once the grace is over; raised on, it would be logged as a fault of ours.
            work.cancel()
            await asyncio.wait({work})
            await request.stop()
        finally:
            watch.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    async def _serve(self, request: _ClientRequest, raw: bytes) -> None:
        """Make attempts until one ends the request; the only place that repeats any."""
        number = 0
        while True:
            request.marks.received(number, len(raw), request.client_id, request.received_ns)
            request.marks.traced(request.trace, request.received_ns)
            try:
                await self._attempt(request, raw)
            except Refusal as refusal:
                await request.refuse(refusal)
            except LegError as error:
                number += 1
                if error.unreached and number < self._config.attempts:
                    request.marks.failed(0, f"{error.leg}: {error.reason}")
                    request.start_over()
                    continue
                await request.lose(error)
            except Exception:  # noqa: BLE001 -- the client gets an answer whatever happens here
                _log.exception("request %s failed inside the router", request.marks.request_id)
                await request.refuse(Refusal.own(500, "the router failed; its log says why", "router_failed"))
            return

    async def _attempt(self, request: _ClientRequest, raw: bytes) -> None:
        try:
            body = RequestBody(raw)
        except BodyError as error:
            raise Refusal.own(400, str(error), "invalid_body") from error
        obstacle = body.obstacle(self._config.mode)
        candidates = Candidates(
            tuple(engine.candidate() for engine in self._prefill), tuple(engine.candidate() for engine in self._decode)
        )
        marks, path = request.marks, request.path
        decision = self._policy.choose(Question(marks.request_id, path, len(raw), body.prompt_tokens), candidates)
        marks.decided(decision, candidates, LOCAL if obstacle else self._config.mode.value)
        await self._dispatcher.run(
            Attempt(
                path=path,
                body=body,
                leg_headers=request.leg_headers(),
                reply_headers=request.ids(),
                prefill=self._prefill[decision.prefill],
                decode=self._decode[decision.decode],
                handoff=not obstacle,
                marks=marks,
                reply=request.reply,
            )
        )


class _ClientRequest:
    """One client's request over all its attempts."""

    def __init__(self, scope: Scope, reply: ClientReply) -> None:
        self.received_ns = time.monotonic_ns()
        self.reply = reply
        self.headers = scope["headers"]
        self.path: str = scope["path"]
        self.client_id = alias(self.headers)
        self.marks = Marks(mint())
        self.trace = carried(self.headers)

    def start_over(self) -> None:
        """Begin another attempt: an id, a clock and a span of its own."""
        self.marks = Marks(mint())
        self.received_ns = time.monotonic_ns()
        self.trace = self.trace.again()

    def ids(self) -> list[tuple[bytes, bytes]]:
        """Return the reply headers that name this attempt."""
        return reply_headers(self.marks.request_id, self.client_id)

    def leg_headers(self) -> LegHeaders:
        """Return the headers of both legs."""
        return [*to_engine(self.headers), ("X-Request-Id", self.marks.request_id), *self.trace.legs.items()]

    async def refuse(self, refusal: Refusal) -> None:
        """End the request with a reply that is no answer, unless it has its answer."""
        if self.reply.ended:
            return
        self.marks.failed(self.reply.status or refusal.status, refusal.reason)
        if not self.reply.status:
            await self.reply.whole(refusal.status, refusal.headers + self.ids(), refusal.body)

    async def stop(self) -> None:
        """End the request because the router ends: an answer that has begun is broken off."""
        if self.reply.status:
            if not self.reply.ended:
                self.marks.failed(self.reply.status, "the router stops")
            return
        await self.refuse(Refusal.own(503, "the router stops", "router_stops"))

    async def lose(self, error: LegError) -> None:
        """End the request whose leg got lost: say so, or break off the answer that has begun and is not whole."""
        if self.reply.ended:
            return
        own = Refusal.own(502, str(error), f"{error.leg}_{'unreachable' if error.unreached else 'lost'}")
        self.marks.failed(self.reply.status or own.status, f"{error.leg}: {error.reason}")
        if not self.reply.status:
            await self.reply.whole(own.status, own.headers + self.ids(), own.body)
