"""A process stopped for 40 ms shows as itself or as unattributed, never as transfer or as the model computing."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tests.engine.deployment import Answer, Deployment, prolong_stop, stop_for
from tests.engine.faults import STOP
from tests.engine.growth import Growth

pytestmark = [pytest.mark.engine, pytest.mark.timing, pytest.mark.timeout(300)]

STOP_MS = 40.0
NOISE_MS = 3.0
PAIRS = 15
BATCHES = 3
STRAY_SHARE = 0.1
"""Of requests, at most: now and then a transfer starves on two cores without any stop."""
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Stop:
    """A process that stops itself at a point of the request, and the causes that may grow."""

    mode: str
    process: str
    role: str
    point: str
    cause: str

    def __str__(self) -> str:
        return f"{self.mode}-{self.process}-{self.point}".replace(".", "-")


AT_A_POINT = (
    Stop("push", "router", "router", "router.before_prefill_leg", "router.dispatch"),
    Stop("push", "prefill.core", "prefill", "core.takes_in", "prefill.frontend"),
    Stop("push", "decode.api", "decode", "frontend.detokenises", "decode.frontend"),
    Stop("pull", "router", "router", "router.before_decode_leg", "router.dispatch"),
    Stop("pull", "prefill.api", "prefill", "frontend.serialises", "prefill.frontend"),
    Stop("pull", "decode.core", "decode", "core.takes_in", "decode.frontend"),
)


@pytest.mark.parametrize(("mode", "stop"), [pytest.param(stop.mode, stop, id=str(stop)) for stop in AT_A_POINT])
def test_stop_at_a_point_shows_in_the_segment_of_its_process(deployment: Deployment, mode: str, stop: Stop) -> None:
    """Each kind of process stops itself at a known point; its own segment, or unattributed, grows by the stop."""
    pid = deployment.pid(stop.process)

    def pair() -> None:
        deployment.send(f"{stop}-plain", prompt_tokens=PROMPT_TOKENS)
        deployment.send(
            str(stop),
            {(stop.role, stop.point): STOP},
            PROMPT_TOKENS,
            meanwhile=partial(prolong_stop, pid, STOP_MS / 1000),
        )

    def off(stopped: list[Answer], plain: list[Answer]) -> list[str]:
        held_ms = deployment.held_ms[str(stop)]
        assert len(held_ms) == len(stopped), "the process did not stop"
        own = Growth.of(stopped, plain, lambda answer: answer.causes_ms[stop.cause] + answer.causes_ms["unattributed"])
        stopped_ms = statistics.median(held_ms)
        near = own.may_be_near(stopped_ms, NOISE_MS)
        return [] if near else [f"stopped for {stopped_ms:.1f} ms, and {stop.cause} and unattributed grew by {own}"]

    measure(deployment, str(stop), pair, off)


ANY_TIME = [
    ("push", "router"),
    ("push", "decode.api"),
    ("push", "decode.core"),
    ("pull", "prefill.api"),
    ("pull", "router"),
]


@pytest.mark.parametrize(("mode", "process"), ANY_TIME)
def test_stop_at_any_time_is_neither_transfer_nor_compute(deployment: Deployment, mode: str, process: str) -> None:
    """Stopped from outside at a time of no meaning: some requests get slower, none by transfer or by computing.

    D's core is stopped in push while D waits for the KV, when no step of it computes.
    """
    pid = deployment.pid(process)
    kind = f"{mode}-{process.replace('.', '-')}-any-time"
    source = random.Random(7)

    def pair() -> None:
        deployment.send(f"{kind}-plain", prompt_tokens=PROMPT_TOKENS)
        after_s = source.uniform(0.005, 0.06 if process != "decode.core" else 0.02)
        deployment.send(kind, None, PROMPT_TOKENS, meanwhile=partial(stop_for, pid, STOP_MS / 1000, after_s))

    measure(deployment, kind, pair)


def measure(
    deployment: Deployment,
    kind: str,
    pair: Callable[[], None],
    off: Callable[[list[Answer], list[Answer]], list[str]] | None = None,
) -> None:
    """Send pairs until all is as it should be; fail if after several batches it is not."""
    for batch in range(1, BATCHES + 1):
        for _ in range(PAIRS):
            pair()
        answers = deployment.answers()
        stopped, plain = answers[kind], answers[f"{kind}-plain"]
        assert len(stopped) == len(plain) == PAIRS * batch
        found = grown(stopped, plain) + (off(stopped, plain) if off else [])
        if not found:
            return
    pytest.fail("; ".join(found))


def grown(stopped: list[Answer], plain: list[Answer]) -> list[str]:
    """Return what of transfer and computing grew: by the median, or by about a stop in more than a stray request."""
    found = []
    for column in ("transfer", "compute_run"):
        growth = Growth.of(stopped, plain, lambda answer, column=column: answer.share_ms(column))
        if growth.low_ms >= NOISE_MS or growth.median_ms >= 2 * NOISE_MS:
            found.append(f"{column} grew by {growth}")
        most_ms = max(answer.share_ms(column) for answer in plain) + STOP_MS / 2
        longer = {answer.name: _longest(answer) for answer in stopped if answer.share_ms(column) > most_ms}
        if len(longer) > len(stopped) * STRAY_SHARE:
            found.append(f"{column} took over {most_ms:.0f} ms in {longer}")
    return found


def _longest(answer: Answer) -> dict[str, float]:
    """Return the causes that took the request longest, ms."""
    return {cause: round(ms, 1) for cause, ms in sorted(answer.causes_ms.items(), key=lambda one: -one[1])[:4]}
