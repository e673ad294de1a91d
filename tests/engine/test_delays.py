"""Delays of 40 ms come back under the cause of the place where they were put, and nowhere else.

Requests go through real engines one at a time, delayed and plain interleaved; medians are compared.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.engine.conftest import Deployments
from tests.engine.deployment import Answer, Deployment
from tests.engine.faults import Settings
from tests.engine.growth import Growth

pytestmark = [pytest.mark.engine, pytest.mark.timing, pytest.mark.timeout(1200)]

DELAY_MS = 40.0
NOISE_MS = 3.0
ROUNDS = 20
BATCHES = 5
"""At most so many times the rounds."""
PLAINS_PER_ROUND = 3
PROMPT_TOKENS = 32
"""Few, since what engines compute on two cores scatters in proportion."""
LONG_MS = 100.0
"""P's forward lasts this much longer where a registration is to be in time."""
LATE_MS = 100.0
"""Longer than P computes: a registration delayed by this is late."""


@dataclass(frozen=True)
class Delay:
    """One kind of request: its delays, and what has to grow, compared with another kind."""

    name: str
    settings: Settings
    cause: str = ""
    """The cause on the path that has to grow by 40 ms; "" for none."""
    hidden: str = ""
    against: str = "plain"
    times: int = 1
    """How often in each round. A registration is late by its delay less all that P does meanwhile, which scatters."""

    def __str__(self) -> str:
        return slug(self.name)


def slug(name: str) -> str:
    """Return the name as it can stand in a header."""
    return name.replace("'s", "").replace(",", "").replace(" ", "-")


_FORWARD = ("prefill", "forward")
_REGISTRATION = ("decode", "push.sends_registration")
LATE = "registration.late"
_BELOW = ("decode", "nixl.sends_registration")
PUSH = (
    Delay("forward on P", {("prefill", "forward"): DELAY_MS}, "prefill.forward"),
    Delay("P's worker takes the step up", {("prefill", "worker.executes"): DELAY_MS}, "prefill.forward"),
    Delay("P's sender thread wakes", {("prefill", "push.writer_wakes"): DELAY_MS}, "writer.wake"),
    Delay("descriptors of the write", {("prefill", "nixl.prepares"): DELAY_MS}, "prepare"),
    Delay("post of the write", {("prefill", "nixl.posts"): DELAY_MS}, "post"),
    Delay("completion is read", {("decode", "nixl.reads_completion"): DELAY_MS}, "detection"),
    Delay("worker reports the load", {("decode", "worker.replies_load"): DELAY_MS}, "report"),
    Delay("forward on D", {("decode", "forward"): DELAY_MS}, "decode.first_step"),
    Delay("worker returns P's token", {("prefill", "worker.replies_tokens"): DELAY_MS}, "prefill.sample"),
    Delay("P's core takes the request in", {("prefill", "core.takes_in"): DELAY_MS}, "prefill.frontend"),
    Delay("P's scheduler finds blocks", {("prefill", "core.allocates"): DELAY_MS}, "prefill.step_boundary"),
    Delay("P's core orders the sampling", {("prefill", "core.orders_sample"): DELAY_MS}, "prefill.sample"),
    Delay("D detokenises", {("decode", "frontend.detokenises"): DELAY_MS}, "decode.frontend"),
    Delay("plain, long", {_FORWARD: LONG_MS}, against="", times=2),
    Delay("registration in time", {_FORWARD: LONG_MS, _REGISTRATION: DELAY_MS}, "", "registration", "plain, long", 2),
    Delay("plain, late", {_REGISTRATION: LATE_MS}, against="", times=3),
    Delay("registration late", {_REGISTRATION: LATE_MS + DELAY_MS}, LATE, against="plain, late", times=3),
    Delay("late in NIXL", {_REGISTRATION: LATE_MS, _BELOW: DELAY_MS}, LATE, against="plain, late", times=3),
)  # fmt: skip

PULL = (
    Delay("router before the decode leg", {("router", "router.before_decode_leg"): DELAY_MS}, "router.dispatch"),
    Delay("router reads P's reply", {("router", "router.reads_reply"): DELAY_MS}, "prefill.reply"),
    Delay("router before the prefill leg", {("router", "router.before_prefill_leg"): DELAY_MS}, "router.dispatch"),
    Delay("forward on P", {("prefill", "forward"): DELAY_MS}, "prefill.forward"),
    Delay("P tokenises", {("prefill", "frontend.renders"): DELAY_MS}, "prefill.frontend"),
    Delay("P serialises", {("prefill", "frontend.serialises"): DELAY_MS}, "prefill.frontend"),
    Delay("D's server parses the head", {("decode", "http.parses"): DELAY_MS}, "decode.hop"),
    Delay("D hands the request to its core", {("decode", "frontend.hands_over"): DELAY_MS}, "decode.frontend"),
    Delay("descriptors of the read", {("decode", "nixl.prepares"): DELAY_MS}, "prepare"),
    Delay("post of the read", {("decode", "nixl.posts"): DELAY_MS}, "post"),
    Delay("the read is seen done", {("decode", "nixl.sees_done"): DELAY_MS}, "detection"),
    Delay("worker reports the load", {("decode", "worker.replies_load"): DELAY_MS}, "report"),
    Delay("forward on D", {("decode", "forward"): DELAY_MS}, "decode.first_step"),
    Delay("D's worker takes the step up", {("decode", "worker.executes"): DELAY_MS}, "decode.first_step"),
    Delay("D's core orders the sampling", {("decode", "core.orders_sample"): DELAY_MS}, "decode.sample"),
    Delay("D's core sends its output", {("decode", "core.sends_output"): DELAY_MS}, "decode.frontend"),
)

DELAYS = {"push": PUSH, "pull": PULL}


@dataclass
class Measurements:
    """What was measured in each mode, so that all tests of a mode share its requests."""

    deployments: Deployments
    answers: dict[str, dict[str, list[Answer]]] = field(default_factory=dict)
    client_ms: dict[str, list[float]] = field(default_factory=dict)
    """TTFT of the plain requests as the client saw it."""
    held_ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By kind, how long the delays of a request really were."""
    batches: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By mode and kind, how often its rounds were sent."""

    def get(self, mode: str) -> dict[str, list[Answer]]:
        """Return the answers by kind, measured first if need be."""
        if mode not in self.answers:
            self.measure(mode)
        return self.answers[mode]

    def measure(self, mode: str, only: Delay | None = None) -> None:
        """Send one more batch of rounds, of all kinds or of one and what it is compared with; what was before stays."""
        deployment = self.deployments.get(mode)
        kinds = [delay for delay in DELAYS[mode] if only is None or str(delay) in {str(only), slug(only.against)}]
        plains = PLAINS_PER_ROUND if only is None else int(only.against == "plain")
        places = [number * len(kinds) // plains for number in range(plains)]
        for _ in range(ROUNDS):
            for position, delay in enumerate(kinds):
                for _ in range(places.count(position)):
                    self._send_plain(mode, deployment)
                for _ in range(delay.times):
                    deployment.send(str(delay), delay.settings, PROMPT_TOKENS)
        self.batches.update((mode, str(delay)) for delay in kinds)
        measured = {"plain", *map(str, DELAYS[mode])}  # and not what other tests had sent before
        self.answers[mode] = {kind: found for kind, found in deployment.answers().items() if kind in measured}
        self.held_ms[mode] = dict(deployment.held_ms)

    def _send_plain(self, mode: str, deployment: Deployment) -> None:
        seen = self.client_ms.setdefault(mode, [])
        seen.append(deployment.send("plain", prompt_tokens=PROMPT_TOKENS))


@pytest.fixture(scope="module")
def measurements(deployments: Deployments) -> Measurements:
    """Return the measurements of both modes, made on demand."""
    return Measurements(deployments)


@pytest.mark.parametrize(
    ("mode", "delay"),
    [
        pytest.param(mode, delay, id=f"{mode}-{delay}")
        for mode, kinds in DELAYS.items()
        for delay in kinds
        if delay.against
    ],
)
def test_delay_comes_back_where_it_was_put(measurements: Measurements, mode: str, delay: Delay) -> None:
    """The named cause grows by the delay, every other cause stays, and so does hidden work unless it is the one named.

    Where one batch of rounds is too noisy to tell, more of this kind are added to it.
    """
    measurements.get(mode)
    while (off := what_is_off(measurements, mode, delay)) and measurements.batches[mode, str(delay)] < BATCHES:
        measurements.measure(mode, delay)
    assert not off


def what_is_off(measurements: Measurements, mode: str, delay: Delay) -> dict[str, object]:
    """Return by how much what grew otherwise than it should, by cause; empty if all is as it should be.

    The delay is what it really was: a thread that asks for 40 ms on a busy core sleeps longer.
    """
    answers, held_ms = measurements.get(mode), measurements.held_ms[mode]
    delayed, plain = answers[str(delay)], answers[slug(delay.against)]
    assert len(delayed) == ROUNDS * delay.times * measurements.batches[mode, str(delay)]
    assert len(plain) >= ROUNDS
    assert len(held_ms[str(delay)]) > 0.8 * len(delayed), "the delay did not happen"
    delay_ms = statistics.median(held_ms[str(delay)]) - statistics.median(held_ms.get(slug(delay.against), [0]))
    assert abs(delay_ms - DELAY_MS) < 2 * NOISE_MS

    off: dict[str, object] = {}
    for cause in {cause for answer in delayed + plain for cause in answer.causes_ms} | ({delay.cause} - {""}):
        growth = Growth.of(delayed, plain, lambda answer, cause=cause: answer.causes_ms.get(cause, 0.0))
        expected_ms = delay_ms if cause == delay.cause else 0.0
        is_near = Growth.is_near if expected_ms and delay.times == 1 else Growth.may_be_near
        if not is_near(growth, expected_ms, NOISE_MS):
            off[cause] = growth
    if delay.hidden:
        hidden = Growth.of(delayed, plain, lambda answer: answer.hidden_ms.get(delay.hidden, 0.0))
        slack = Growth.of(delayed, plain, lambda answer: -answer.slack_ms.get(delay.hidden, 0.0))
        if not hidden.is_near(delay_ms, NOISE_MS):
            off[f"hidden {delay.hidden}"] = hidden
        if not slack.may_be_near(delay_ms, NOISE_MS):
            off[f"slack of {delay.hidden}"] = slack
    return off and {"delayed by, ms": round(delay_ms, 1)} | off


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_shares_are_exact_and_every_request_is_complete(measurements: Measurements, mode: str) -> None:
    """Delayed or not: classes sum to the TTFT to the nanosecond, segments tile it, and the hand-off is whole."""
    for answer in (answer for kind in measurements.get(mode).values() for answer in kind):
        row = answer.row

        assert row["verdict"] == "complete", f"{answer.name}: {row['note']}"
        assert row["scope"] == "router"
        assert row["mode"] == mode
        shares = ("compute_ns", "coordination_ns", "transfer_ns", "unattributed_ns")
        assert sum(row[share] for share in shares) == row["ttft_ns"] == row["first_token_ns"] - row["start_ns"]
        assert row["compute_run_ns"] + row["compute_queue_ns"] == row["compute_ns"]
        edges = [segment["start_ns"] for segment in answer.segments] + [answer.segments[-1]["end_ns"]]
        assert edges == [row["start_ns"]] + [segment["end_ns"] for segment in answer.segments]
        assert row["transfer_low_ns"] <= row["transfer_ns"] <= row["transfer_high_ns"]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_little_stays_unattributed(measurements: Measurements, mode: str) -> None:
    """Of plain requests less than 2 % of the TTFT is unexplained at the median, and less than 5 % at the p99."""
    plain = measurements.get(mode)["plain"]
    shares = sorted(answer.row["unattributed_ns"] / answer.row["ttft_ns"] for answer in plain)

    assert len(plain) >= 60
    assert statistics.median(shares) < 0.02
    assert shares[round(0.99 * (len(shares) - 1))] < 0.05


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_ttft_agrees_with_the_client(measurements: Measurements, mode: str) -> None:
    """The router's TTFT is the client's less the client's own path: 2 ms at the median."""
    answers = sorted(measurements.get(mode)["plain"], key=lambda answer: answer.row["start_ns"])
    differences = [
        client_ms - answer.share_ms("ttft")
        for client_ms, answer in zip(measurements.client_ms[mode], answers, strict=True)
    ]

    assert 0 <= statistics.median(differences) <= 2
