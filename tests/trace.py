"""A builder for traces with small round times: milliseconds in, events out. Times are relative to the trace's start."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace import assemble, attribution, stages
from kvtrace.model import Attribution, Event, Process

MS = 1_000_000
START_NS = 1_000_000_000_000_000_000
ROUTER, P, D, P_API, D_API = 1, 2, 3, 4, 5

PROCESSES = {
    ROUTER: Process(ROUTER, "router", "", "host-a"),
    P: Process(P, "core", "engine-p", "host-a"),
    D: Process(D, "core", "engine-d", "host-a"),
    P_API: Process(P_API, "api", "engine-p", "host-a"),
    D_API: Process(D_API, "api", "engine-d", "host-a"),
}


class Trace:
    """Collects events: `trace.at(12.5, stages.READY, "id")`. Requests, steps and whole hand-offs have helpers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def at(
        self,
        t_ms: float,
        stage: stages.Stage,
        request: str = "",
        *payload: int,
        ref: str = "",
        process: int | None = None,
    ) -> Trace:
        values = list(payload) + [0] * (4 - len(payload))
        self.events.append(
            Event(ns(t_ms), stage.name, _home(stage) if process is None else process, request, ref, *values)
        )
        return self

    def step(
        self, process: int, number: int, times_ms: tuple[float, float, float, float, float],
        tokens: int = 1, requests: int = 1, connector_ms: float = 0.0, before_ms: float = 0.0,
    ) -> Trace:  # fmt: skip
        """Add one engine step: (scheduled, started, forwarded, connected, ended)."""
        scheduled, started, forwarded, connected, ended = times_ms
        self.at(scheduled, stages.STEP_SCHEDULED, "", number, tokens, requests, process=process)
        self.at(started, stages.STEP_STARTED, "", number, process=process)
        if tokens:
            self.at(forwarded, stages.STEP_FORWARDED, "", number, process=process)
        self.at(
            connected,
            stages.STEP_CONNECTED,
            "",
            number,
            0,
            int(connector_ms * MS),
            int(before_ms * MS),
            process=process,
        )
        return self.at(ended, stages.STEP_ENDED, "", number, process=process)

    def without(self, *names: str) -> Trace:
        """Return a copy that lacks the named stages."""
        copy = Trace()
        copy.events = [event for event in self.events if event.stage not in names]
        return copy

    def shifted(self, from_ms: float, by_ms: float, only: Iterable[str] = ()) -> Trace:
        """Return a copy in which events at or after `from_ms` (of the named stages, all if none) come `by_ms` later."""
        wanted = set(only)
        copy = Trace()
        copy.events = [
            event._replace(t_ns=event.t_ns + int(by_ms * MS))
            if event.t_ns >= ns(from_ms) and (not wanted or event.stage in wanted)
            else event
            for event in self.events
        ]
        return copy

    def later(self, by_ms: float, number: int = 100) -> Trace:
        """Return a copy that happens `by_ms` later, its steps numbered from `number` on."""
        copy = self.shifted(-1e9, by_ms)
        copy.events = [
            event._replace(a=event.a + number)
            if event.stage.startswith("step.") or event.stage.endswith(".scheduled")
            else event
            for event in copy.events
        ]
        return copy

    def answers(self, processes: dict[int, Process] | None = None) -> list[Attribution]:
        """Return the attribution of every request in the trace."""
        processes = PROCESSES if processes is None else processes
        requests = assemble.assemble(self.events, processes)
        around = attribution.surroundings(self.events, requests, processes)
        return [attribution.attribute(request, around) for request in requests]

    def answer(self) -> Attribution:
        """Return the attribution of the trace's only request."""
        (answer,) = self.answers()
        return answer


def ns(t_ms: float) -> int:
    """Return the unix ns of a trace time in ms."""
    return START_NS + round(t_ms * MS)


def causes_ms(answer: Attribution) -> dict[str, float]:
    """Return cause -> total ms on the critical path."""
    totals: dict[str, float] = {}
    for segment in answer.segments:
        totals[segment.cause] = totals.get(segment.cause, 0.0) + (segment.end_ns - segment.start_ns) / MS
    return totals


def _home(stage: stages.Stage) -> int:
    if stage.name.startswith("router."):
        return ROUTER
    if "http" in stage.name or stage.name == "decode.first_token_out":
        return P_API if stage.name.startswith("prefill") else D_API
    if stage.where is stages.Where.PREFILL or stage.name in ("registration.received", "transfer.matched"):
        return P
    return D


JITTER_BYTES = 160


def jittered(events: list[Event], noise: bytes) -> list[Event]:
    """Return the events, each up to 40 ms earlier or later by two bytes of `noise`, of which there are JITTER_BYTES.

    Hypothesis draws bytes at once, and eighty floats in four times as long as a walk takes.
    """
    by_ns = (
        int.from_bytes(noise[at : at + 2], "big", signed=True) * 40 * MS // (1 << 15) for at in range(0, len(noise), 2)
    )
    return [event._replace(t_ns=event.t_ns + moved_ns) for event, moved_ns in zip(events, by_ns, strict=False)]


def check_tiles(trace: Trace, processes: dict[int, Process] | None = None) -> None:
    """Check of every answer that its segments tile its TTFT, its shares sum to it, and the bracket holds."""
    for answer in trace.answers(processes):
        if answer.ttft_ns is None:
            continue
        assert sum(answer.shares_ns.values()) == answer.ttft_ns
        at_ns = answer.start_ns
        for segment in answer.segments:
            assert segment.start_ns == at_ns
            assert segment.end_ns > segment.start_ns
            at_ns = segment.end_ns
        assert at_ns == answer.first_token_ns or answer.ttft_ns == 0
        transfer_ns = answer.shares_ns["transfer"]
        assert 0 <= answer.transfer_low_ns <= transfer_ns <= answer.transfer_high_ns <= answer.ttft_ns


def push(registration_sent_ms: float = 4.0, name: str = "r1") -> Trace:
    """Return a tidy push hand-off of 60 ms. P computes 10..30; D's registration is sent at 4 unless told otherwise.

    ms: 0 received, 1 both legs sent, 2 at the HTTP servers, 3 enqueued, P's step 5..31, write posted 36..38,
    notified 42, reported 44, ready 45, D's step 46..54, first token out 57, at the router 60.
    """
    p, d = f"cmpl-{name}-0-aaaaaaaa", f"cmpl-{name}-0-bbbbbbbb"
    received = max(registration_sent_ms + 1, 5)
    matched = max(35.0, received)
    late = matched - 35.0
    trace = _front(name, 1.0, 1.0)
    trace.at(3, stages.PREFILL_ENQUEUED, p, 600).at(3, stages.DECODE_ENQUEUED, d, 600, 0, 1, ref=name)
    trace.at(3.5, stages.DECODE_ALLOCATED, d, 38, 599).at(min(3.8, registration_sent_ms), stages.REGISTRATION_QUEUED, d)
    trace.at(registration_sent_ms, stages.REGISTRATION_SENT, d).at(received, stages.REGISTRATION_RECEIVED, d)
    trace.at(4, stages.PREFILL_SCHEDULED, p, 1, 600, 0, 600).step(P, 1, (4, 10, 30, 30.5, 31), tokens=600)
    trace.at(31, stages.PREFILL_FINISHED, p, 38, 1).at(33, stages.PREFILL_STAGED, p).at(34, stages.SENDER_PICKED, p)
    trace.step(P, 2, (31.5, 32.5, 0, 33.2, 33.3), tokens=0)
    trace.at(33.5, stages.SENDER_WOKE, process=P).at(90 + late, stages.SENDER_SLEPT, process=P)
    trace.at(matched, stages.MATCHED, p, ref=d).at(35.5 + late, stages.PREPARED, p, 7, 20, 0, ref=d, process=P)
    trace.at(36 + late, stages.POST_STARTED, p, 7, process=P).at(
        38 + late, stages.POST_ENDED, p, 7, 1_300_000, 20, 0, process=P
    )
    trace.at(43 + late, stages.TRANSFER_DONE, p, 7, process=P).at(42 + late, stages.NOTIFIED, d)
    trace.at(32, stages.PREFILL_HTTP_RESPONDED, name, 200).at(33, stages.ROUTER_PREFILL_RETURNED, name, 200)
    return _finish(trace, name, d, late)


def pull(name: str = "r1", dispatch_ms: float = 1.0) -> Trace:
    """Return a tidy pull hand-off: P as in push, its reply at the router at 33, D's leg sent `dispatch_ms` later.

    With 1 ms: D's HTTP 35, enqueued 36, allocated 37, loading 38, posted 39..40, done seen 43, reported 44, ready 45.
    """
    p, d = f"cmpl-{name}-0-aaaaaaaa", f"cmpl-{name}-0-bbbbbbbb"
    late = dispatch_ms - 1.0
    trace = _front(name, 1.0, 33 + dispatch_ms)
    trace.at(3, stages.PREFILL_ENQUEUED, p, 600)
    trace.at(4, stages.PREFILL_SCHEDULED, p, 1, 600, 0, 600).step(P, 1, (4, 10, 30, 30.5, 31), tokens=600)
    trace.at(31, stages.PREFILL_FINISHED, p, 38, 1).at(32, stages.PREFILL_HTTP_RESPONDED, name, 200)
    trace.at(33, stages.ROUTER_PREFILL_RETURNED, name, 200)
    trace.at(36 + late, stages.DECODE_ENQUEUED, d, 600, 0, 1, ref=p).at(37 + late, stages.DECODE_ALLOCATED, d, 38, 599)
    trace.at(38 + late, stages.LOAD_STARTED, d, 0, 38).at(38.5 + late, stages.PREPARED, d, 7, 20, 0, ref=p, process=D)
    trace.at(39 + late, stages.POST_STARTED, d, 7, process=D).at(
        40 + late, stages.POST_ENDED, d, 7, 1_300_000, 20, 0, process=D
    )
    trace.at(43 + late, stages.TRANSFER_DONE, d, 7, process=D).at(43.5 + late, stages.NOTIFIED, p, process=P)
    return _finish(trace, name, d, late)


def _front(name: str, prefill_sent_ms: float, decode_sent_ms: float) -> Trace:
    trace = Trace().at(0, stages.ROUTER_RECEIVED, name).at(0.5, stages.ROUTER_DECIDED, name)
    trace.at(prefill_sent_ms, stages.ROUTER_PREFILL_SENT, name).at(
        prefill_sent_ms + 1, stages.PREFILL_HTTP_RECEIVED, name
    )
    return trace.at(decode_sent_ms, stages.ROUTER_DECODE_SENT, name).at(
        decode_sent_ms + 1, stages.DECODE_HTTP_RECEIVED, name
    )


def _finish(trace: Trace, name: str, d: str, late: float) -> Trace:
    trace.at(44 + late, stages.REPORTED, d).at(45 + late, stages.READY, d)
    trace.at(46 + late, stages.DECODE_SCHEDULED, d, 9, 1, 599, 600)
    trace.step(D, 9, (46 + late, 46.5 + late, 52 + late, 53 + late, 54 + late), connector_ms=0.5)
    trace.at(57 + late, stages.DECODE_FIRST_TOKEN_OUT, name, 200).at(60 + late, stages.ROUTER_FIRST_TOKEN, name)
    trace.at(90 + late, stages.DECODE_FINISHED, d, 5).at(95 + late, stages.ROUTER_DONE, name, 200)
    return trace
