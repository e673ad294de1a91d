"""Published measurements as traces: points and times only, the figures those of the reports, in round milliseconds."""

from __future__ import annotations

from kvtrace import stages
from tests.field.scenes import changed, lacking, repeated
from tests.trace import MS, D, P, Trace, _front, ns, pull, push

FIRST_TOKEN_ON_P_MS = 60.0


def hand_over(name: str = "r1") -> Trace:
    """Return the pull of vllm#50913, medians taken for one request: 197 ms from P's token to the client's first one.

    ms: P's token 60, D's leg sent 85 and there at 90, tokenised 105, blocks 106, load begun 134.8 (28.8 behind a step),
    read 135..164 (29, seen by a probe), noticed 192.1 (28.1 later), ready 194, D's step 195..252 (58 with what is
    around it), first token out 254, at the client 257.
    """
    p, d = f"cmpl-{name}-0-aaaaaaaa", f"cmpl-{name}-0-bbbbbbbb"
    trace = _front(name, 1.0, 85)
    trace = changed(trace, stages.DECODE_HTTP_RECEIVED, t_ns=ns(90))
    trace.at(3, stages.PREFILL_ENQUEUED, p, 5000).at(4, stages.PREFILL_SCHEDULED, p, 1, 5000, 0, 5000)
    trace.step(P, 1, (4, 5, 59, 59.5, 60), tokens=5000).at(60, stages.PREFILL_FINISHED, p, 79, 1)
    trace.at(70, stages.PREFILL_HTTP_RESPONDED, name, 200).at(75, stages.ROUTER_PREFILL_RETURNED, name, 200)
    trace.at(105, stages.DECODE_ENQUEUED, d, 5000, 0, 1, ref=p).at(106, stages.DECODE_ALLOCATED, d, 79, 4999)
    trace.at(134.8, stages.LOAD_STARTED, d, 0, 79).at(134.9, stages.PREPARED, d, 7, 1785, 0, ref=p, process=D)
    trace.at(135, stages.POST_STARTED, d, 7, process=D)
    trace.at(141.7, stages.POST_ENDED, d, 7, 167_000_000, 1785, 0, process=D)
    trace.at(164, stages.PROBED, d, 7, ns(163.9), process=D).at(192.1, stages.TRANSFER_DONE, d, 7, process=D)
    trace.at(193, stages.REPORTED, d).at(194, stages.READY, d).at(195, stages.DECODE_SCHEDULED, d, 9, 1, 4999, 5000)
    trace.step(D, 9, (195, 195.5, 250, 250.5, 252)).at(254, stages.DECODE_FIRST_TOKEN_OUT, name, 200)
    trace.at(257, stages.ROUTER_FIRST_TOKEN, name).at(300, stages.DECODE_FINISHED, d, 5)
    return trace.at(305, stages.ROUTER_DONE, name, 200)


def read(post_ms: float, transfer_ms: float, *, on_forward_thread: bool) -> Trace:
    """Return r1's read beside r2, which decodes on the same D: 38.7 ms of 6.7 posting, or 39.4 of 11.9 (vllm#50913).

    r1's KV is seen at 104.7 either way. Posted on the forward thread it is posted inside r2's step, before the forward.
    """
    trace = pull().shifted(36.5, 64)
    posted = 104.7 - transfer_ms
    for stage, at_ms in (
        (stages.DECODE_ALLOCATED, 37), (stages.LOAD_STARTED, posted - 0.2), (stages.PREPARED, posted - 0.1),
        (stages.POST_STARTED, posted), (stages.POST_ENDED, posted + post_ms),
    ):  # fmt: skip
        trace = changed(trace, stage, t_ns=ns(at_ms))
    trace.at(104.7, stages.PROBED, "cmpl-r1-0-bbbbbbbb", 7, ns(104.6), process=D)
    other = lacking(push(name="r2").later(0, 200), lambda e: e.stage.startswith("step.") and e.process == P)
    other = changed(other, stages.DECODE_FINISHED, t_ns=ns(89.9), a=2)
    spent_ms = post_ms + 1 if on_forward_thread else 0
    other.step(D, 10, (posted - 2, posted - 1, 88, 89, 90), connector_ms=spent_ms, before_ms=spent_ms)
    return repeated(trace, other)


def joined(reply_ms: float, name: str = "r1") -> Trace:
    """Return the push of sglang#22853: 6 ms of transfer, D's token out at 57, held by the router until P's reply.

    P's reply comes `reply_ms` after D's token; the client has its first token 3 ms behind the later of the two.
    """
    trace = push(name=name)
    trace = changed(trace, stages.ROUTER_PREFILL_RETURNED, t_ns=ns(57 + reply_ms))
    return trace.shifted(58, max(0.0, reply_ms), only=["router.first_token", "decode.finished", "router.done"])


def queued(service_ms: float, count: int = 40, every_ms: float = 125) -> list[Trace]:
    """Return pushes that arrive 8 a second at a P which takes `service_ms` for each: the one step after the other."""
    traces = []
    free_ms = 0.0
    for number in range(count):
        arrived_ms = every_ms * number
        begun_ms = max(arrived_ms + 4, free_ms)
        one = push(name=f"q{number:02}").shifted(10.5, service_ms - 27).shifted(3.9, begun_ms - arrived_ms - 4)
        traces.append(one.later(arrived_ms, 100 * (number + 1)))
        free_ms = begun_ms + service_ms + 3
    return traces


__all__ = ["FIRST_TOKEN_ON_P_MS", "MS", "hand_over", "joined", "queued", "read"]
