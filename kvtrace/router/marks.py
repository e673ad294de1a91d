"""The points that a router stamps, for one attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import emit, stages
from kvtrace.modes import LOCAL

if TYPE_CHECKING:
    from kvtrace.router.policy import Candidates, Decision
    from kvtrace.router.trace_context import Carried

_RECEIVED = stages.ROUTER_RECEIVED.code
_DECIDED = stages.ROUTER_DECIDED.code
_CANDIDATE = stages.ROUTER_CANDIDATE.code
_PREFILL_SENT = stages.ROUTER_PREFILL_SENT.code
_PREFILL_RETURNED = stages.ROUTER_PREFILL_RETURNED.code
_DECODE_SENT = stages.ROUTER_DECODE_SENT.code
_FIRST_TOKEN = stages.ROUTER_FIRST_TOKEN.code
_DONE = stages.ROUTER_DONE.code
_FAILED = stages.ROUTER_FAILED.code
_CANCELLED = stages.ROUTER_CANCELLED.code
_TRACED = stages.ROUTER_TRACED.code
_HALF_BITS = 64


class Marks:
    """Stamps the points of one attempt under its minted id."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._emit = emit.tracer().emit

    def received(self, attempt: int, body_bytes: int, client_id: str, t_ns: int) -> None:
        """Stamp `router.received` as of `t_ns`, when the head came."""
        self._emit(_RECEIVED, self.request_id, attempt, body_bytes, ref=client_id, t_ns=t_ns)

    def traced(self, context: Carried, t_ns: int) -> None:
        """Stamp the request's place in its trace as of `t_ns`."""
        halves = _signed(context.trace_id >> _HALF_BITS), _signed(context.trace_id)
        spans = _signed(context.parent_span), _signed(context.own_span)
        self._emit(_TRACED, self.request_id, *halves, *spans, ref=f"{context.flags:02x}", t_ns=t_ns)

    def decided(self, decision: Decision, candidates: Candidates, mode: str) -> None:
        """Stamp the decision and, for each candidate, the queue that it was taken on."""
        request_id = self.request_id
        prefill = candidates.prefill[decision.prefill]
        decode = candidates.decode[decision.decode]
        index = -1 if mode == LOCAL else prefill.index
        self._emit(_DECIDED, request_id, index, decode.index, prefill.inflight, decode.inflight, mode)
        for leg, side in enumerate((candidates.prefill, candidates.decode)):
            for candidate in side:
                counts = (candidate.index, candidate.inflight, candidate.tokens)
                self._emit(_CANDIDATE, request_id, leg, *counts, ref=candidate.url)

    def prefill_sent(self, url: str) -> None:
        """Stamp the prefill leg's departure."""
        self._emit(_PREFILL_SENT, self.request_id, ref=url)

    def prefill_returned(self, status: int, *, handed_over: bool) -> None:
        """Stamp P's whole reply, and whether it hands KV over."""
        self._emit(_PREFILL_RETURNED, self.request_id, status, int(handed_over))

    def decode_sent(self, url: str) -> None:
        """Stamp the decode leg's departure."""
        self._emit(_DECODE_SENT, self.request_id, ref=url)

    def first_token(self) -> None:
        """Stamp the first content on its way to the client."""
        self._emit(_FIRST_TOKEN, self.request_id)

    def done(self, status: int, chunks: int) -> None:
        """Stamp the whole answer's departure."""
        self._emit(_DONE, self.request_id, status, chunks)

    def failed(self, status: int, reason: str) -> None:
        """Stamp a failure: the status that the client got, and a short reason."""
        self._emit(_FAILED, self.request_id, status, ref=reason)

    def cancelled(self) -> None:
        """Stamp that the client went away."""
        self._emit(_CANCELLED, self.request_id)


def _signed(value: int) -> int:
    """Return the lower 64 bits as the wire has them: signed."""
    low = value & ((1 << _HALF_BITS) - 1)
    return low - (1 << _HALF_BITS) if low >> (_HALF_BITS - 1) else low
