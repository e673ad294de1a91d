"""One request in other tools' words: what vLLM, NIXL, llm-d and Dynamo would report for it, and why that differs.

People compare numbers of the same name. Each line gives the span that the other tool measures, worked out from
kvtrace's points, so that a difference is a matter of definition and can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtrace import stages
from kvtrace.modes import MODES, PULL
from kvtrace.stages import Stage


@dataclass(frozen=True, slots=True)
class Span:
    """What one tool reports under one name: from where to where, and what a reader should know of it."""

    tool: str
    name: str
    begin: Stage
    end: Stage
    says: str
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True, slots=True)
class Line:
    """One span of one request; `duration_ns` is None where one of its ends was not recorded, or they are reversed."""

    tool: str
    name: str
    duration_ns: int | None
    begin: str
    end: str
    says: str


SPANS: tuple[Span, ...] = (
    Span(
        "vLLM on P",
        "time to first token",
        stages.PREFILL_HTTP_RECEIVED,
        stages.PREFILL_HTTP_RESPONDED,
        "P's own first token, which the client never sees",
    ),
    Span(
        "vLLM on P",
        "queue time",
        stages.PREFILL_ENQUEUED,
        stages.PREFILL_BEGUN,
        "until P's scheduler first includes it",
    ),
    Span("vLLM on P", "prefill time", stages.PREFILL_BEGUN, stages.PREFILL_FINISHED, "from there to P's token"),
    Span(
        "vLLM on D",
        "time to first token",
        stages.DECODE_HTTP_RECEIVED,
        stages.DECODE_FIRST_TOKEN_OUT,
        "counts from D's leg: in pull P's whole part is missing",
    ),
    Span(
        "vLLM on D",
        "queue time",
        stages.DECODE_ENQUEUED,
        stages.DECODE_BEGUN,
        "registration, transfer and detection are booked as D's queue",
    ),
    Span("vLLM on D", "prefill time", stages.DECODE_BEGUN, stages.DECODE_SAMPLED, "D computes the first token again"),
    Span(
        "NIXL",
        "transfer time",
        stages.POST_STARTED,
        stages.TRANSFER_DONE,
        "ends when somebody asks, not when the last byte arrives; holds the post",
    ),
    Span("NIXL", "post time", stages.POST_STARTED, stages.POST_ENDED, "the call that posts"),
    Span(
        "llm-d",
        "prefill_duration",
        stages.ROUTER_PREFILL_SENT,
        stages.ROUTER_PREFILL_RETURNED,
        "the prefill leg at the router",
        (PULL,),
    ),
    Span(
        "llm-d",
        "true_ttft",
        stages.ROUTER_RECEIVED,
        stages.ROUTER_DECODE_SENT,
        "ends when D's leg is sent: no transfer, no D, no token",
        (PULL,),
    ),
    Span(
        "llm-d",
        "coordinator_overhead",
        stages.ROUTER_PREFILL_RETURNED,
        stages.ROUTER_DECODE_SENT,
        "between the two legs only",
        (PULL,),
    ),
    Span(
        "llm-d",
        "decode_duration",
        stages.ROUTER_DECODE_SENT,
        stages.ROUTER_DONE,
        "the decode leg to its end, transfer included",
        (PULL,),
    ),
    Span(
        "Dynamo",
        "kv_transfer_estimated_latency",
        stages.ROUTER_PREFILL_RETURNED,
        stages.ROUTER_FIRST_TOKEN,
        "an upper bound: dispatch, network, transfer and one forward on D",
    ),
    Span(
        "Dynamo",
        "time to first token",
        stages.ROUTER_RECEIVED,
        stages.ROUTER_FIRST_TOKEN,
        "the same span as kvtrace's in scope router",
    ),
)
"""Spans by tool, as its documentation and source define them; llm-d's are of its path with one leg after the other."""


def reconcile(points: Mapping[str, int], mode: str) -> list[Line]:
    """Return what other tools would report for a request with these points (name -> unix ns), in a fixed order.

    NIXL's end is the poll of the side that drives the transfer, in either mode; `points` has to hold that one.
    """
    return [
        Line(span.tool, span.name, _between(points, span), span.begin.name, span.end.name, span.says)
        for span in SPANS
        if mode in span.modes
    ]


def _between(points: Mapping[str, int], span: Span) -> int | None:
    begin_ns, end_ns = points.get(span.begin.name), points.get(span.end.name)
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return end_ns - begin_ns
