"""The two orders of dispatch. Pull sends P's leg, then D's with what P replied; push sends both at once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvtrace.router.config import Mode, TransferId
from kvtrace.router.replies import Refusal
from kvtrace.router.sse import ContentCounter
from kvtrace.router.upstream import LegError

if TYPE_CHECKING:
    from kvtrace.router.bodies import RequestBody
    from kvtrace.router.config import Coordinates, RouterConfig
    from kvtrace.router.headers import Headers, LegHeaders
    from kvtrace.router.marks import Marks
    from kvtrace.router.replies import ClientReply
    from kvtrace.router.upstream import Client, Engine, Reply


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_prefill_reply = msgspec.json.Decoder(_PrefillReply)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at one request: where it goes, what it carries, whom it answers."""

    path: str
    body: RequestBody
    leg_headers: LegHeaders
    reply_headers: Headers
    prefill: Engine
    decode: Engine
    handoff: bool
    """False if D has to serve the request alone."""
    marks: Marks
    reply: ClientReply

    @property
    def chat(self) -> bool:
        """Return whether this is a chat completion."""
        return self.path.endswith("/chat/completions")

    @property
    def tokens(self) -> int:
        """Return the prompt's length where it is known, else 0."""
        return self.body.prompt_tokens or 0


class Dispatcher:
    """Carries attempts out. Raises Refusal for a reply that is no answer, LegError for a leg that got none."""

    def __init__(self, config: RouterConfig, client: Client) -> None:
        self._config = config
        self._client = client

    async def run(self, attempt: Attempt) -> None:
        """Carry `attempt` out, up to the answer's last byte."""
        if attempt.handoff and self._config.mode is Mode.PUSH and attempt.prefill.coordinates is not None:
            await self._push(attempt, attempt.prefill.coordinates)
            return
        with attempt.decode.holding(attempt.tokens):
            params = None
            if attempt.handoff:
                # Also a push whose P has not yet said where it can be found: its reply tells D, and later requests.
                with attempt.prefill.holding(attempt.tokens):
                    params = await self._prefill(attempt)
            await self._relay(attempt, *await self._decode(attempt, params))

    async def _push(self, attempt: Attempt, coordinates: Coordinates) -> None:
        held = ExitStack()
        held.enter_context(attempt.prefill.holding(attempt.tokens))
        prefill = asyncio.create_task(self._prefill(attempt))
        prefill.add_done_callback(lambda _: held.close())
        decode = asyncio.create_task(self._decode(attempt, coordinates.params() | self._names(attempt)))
        try:
            with attempt.decode.holding(attempt.tokens):
                await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
                if not decode.done():
                    params = prefill.result()
                    if params is None or attempt.prefill.coordinates != coordinates:
                        # D waits for KV from a P that has restarted under another name, or that keeps none.
                        await _stop(decode)
                        decode = asyncio.create_task(self._decode(attempt, params))
                await self._relay(attempt, *await decode)
            # The answer is whole. What is left of P's reply may say that P has restarted.
            await asyncio.wait({prefill}, timeout=self._config.grace_s)
        finally:
            await _stop(prefill, decode)
            if not decode.cancelled() and decode.exception() is None:
                # D may have answered in the moment in which the client left.
                decode.result()[0].close()

    def _transfer_id(self, attempt: Attempt) -> str:
        if self._config.mode is Mode.PULL or self._config.transfer_id is TransferId.OFF:
            return ""
        known = attempt.prefill.takes_transfer_id and attempt.decode.takes_transfer_id
        return attempt.marks.request_id if known or self._config.transfer_id is TransferId.ON else ""

    def _names(self, attempt: Attempt) -> dict[str, Any]:
        """Return what D is told about the request on P in push, besides where P is.

        vLLM matches the legs by their ids without the random suffix, which nobody outside P knows; the name given
        here only marks D's heartbeats. The count of tokens is left out where the prompt was sent as text: push does
        not use it.
        """
        request_id = attempt.marks.request_id
        names: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": f"chatcmpl-{request_id}" if attempt.chat else f"cmpl-{request_id}-0",
        }
        if attempt.body.prompt_tokens is not None:
            names["remote_num_tokens"] = attempt.body.prompt_tokens
        if transfer_id := self._transfer_id(attempt):
            names["transfer_id"] = transfer_id
        return names

    async def _prefill(self, attempt: Attempt) -> dict[str, Any] | None:
        """Send P's leg and return the kv_transfer_params of its reply, None if P hands nothing over."""
        transfer_id = self._transfer_id(attempt)
        body = attempt.body.prefill(chat=attempt.chat, transfer_id=transfer_id)
        attempt.marks.prefill_sent(attempt.prefill.url)
        try:
            reply = await self._client.post(attempt.prefill, attempt.path, body, attempt.leg_headers)
        except LegError as error:
            if error.unreached:
                # Whatever comes back at this address may have another name.
                attempt.prefill.coordinates = None
            raise
        try:
            content = await reply.body(self._config.max_body_bytes)
        finally:
            reply.close()
        params = _handed_over(content) if reply.ok else None
        attempt.marks.prefill_returned(reply.status, handed_over=params is not None)
        if not reply.ok:
            raise Refusal(f"prefill: {reply.status}", reply.status, reply.headers, content)
        if params is not None:
            attempt.prefill.learn(params)
            if transfer_id:
                params.setdefault("transfer_id", transfer_id)
        return params

    async def _decode(self, attempt: Attempt, params: dict[str, Any] | None) -> tuple[Reply, bytes]:
        """Return D's reply and the first bytes of its body, until which D may still be waiting for P."""
        body = attempt.body.decode(params)
        attempt.marks.decode_sent(attempt.decode.url)
        reply = await self._client.post(attempt.decode, attempt.path, body, attempt.leg_headers)
        try:
            first = await reply.chunk()
            if not reply.ok:
                first += await reply.body(self._config.max_body_bytes)
                raise Refusal(f"decode: {reply.status}", reply.status, reply.headers, first)
        except BaseException:
            reply.close()
            raise
        return reply, first

    async def _relay(self, attempt: Attempt, reply: Reply, chunk: bytes) -> None:
        """Pass D's answer on, byte for byte as it comes."""
        counter = ContentCounter() if reply.is_event_stream else None
        client, marks = attempt.reply, attempt.marks
        try:
            await client.start(reply.status, reply.headers + attempt.reply_headers)
            while chunk:
                if counter is not None:
                    new = counter.feed(chunk)
                    if new and new == counter.content_count:
                        marks.first_token()
                    if counter.end_seen and not client.ended:
                        _conclude(attempt, reply, counter)
                await client.write(chunk)
                chunk = await reply.chunk()
        finally:
            reply.close()
        if not client.ended:
            _conclude(attempt, reply, counter)
        await client.end()


def _conclude(attempt: Attempt, reply: Reply, counter: ContentCounter | None) -> None:
    """Stamp the end before it leaves, as first content is, so that no client is ahead of the record."""
    attempt.reply.ended = True
    if counter is not None and counter.error_seen:
        attempt.marks.failed(reply.status, "decode: an error in the stream")
    else:
        attempt.marks.done(reply.status, counter.content_count if counter is not None else 1)


def _handed_over(content: bytes) -> dict[str, Any] | None:
    try:
        return _prefill_reply.decode(content).kv_transfer_params or None
    except (msgspec.DecodeError, RecursionError):
        return None


async def _stop(*legs: asyncio.Task[Any]) -> None:
    """Cancel legs that still run and wait until their connections are closed."""
    for leg in legs:
        leg.cancel()
    await asyncio.gather(*legs, return_exceptions=True)
