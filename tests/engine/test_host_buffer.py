"""KV through host buffers: vLLM's own saves and loads over real engines, with a stand-in for a device's copy alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtrace import stages
from kvtrace.copies import TO_DEVICE, TO_HOST
from kvtrace.lab import workload
from tests import spooled
from tests.engine import programs, sites
from tests.engine.conftest import Deployments
from tests.engine.deployment import Answer, Deployment
from tests.engine.growth import Growth
from tests.engine.test_odd_engines import BLOCK_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SITES = {role: {"PYTHONPATH": sites.paths("host_site", "start_site")} for role in ("prefill", "decode")}
BLOCKS = 5  # 600 tokens, 128 to a block
SAVE_MS, LOAD_MS = 40.0, 60.0
PAIRS = 8
NOISE_MS = 12.0
"""What two busy cores add to a copy now and then."""


def copied_ms(answer: Answer, told: str) -> float:
    """Return how long the path waited for the copies of one side, ms."""
    return sum((one["end_ns"] - one["start_ns"]) / 1e6 for one in answer.segments if one["waited_for"] == told)


def tokens(deployment: Deployment, url: str, seed: int) -> list[Any]:
    """Return what four prompts are answered with."""
    load = workload.run(
        url, quiet=True, requests=4, rate_qps=1000.0, concurrency=1, input_len=300, output_len=4, seed=seed
    )
    return [(record.status, record.token_ids) for record in load.records]


# `connector` and not `mode`, since these tests have labs of their own.
@pytest.mark.parametrize("connector", ["push", "pull"])
def test_copies_through_host_buffers_are_transfer(deployments: Deployments, connector: str) -> None:
    """40 ms more on P and 60 on D come back as host.copy on that side, and other causes stay as they are."""
    deployment = deployments.get(connector, f"host-buffer-{connector}", environment=SITES)
    router, alone = deployment.lab.url, deployment.lab.engines[1].url
    assert tokens(deployment, router, 3) == tokens(deployment, alone, 3)
    with deployment.faults.on({("decode", "copies.none"): 1}):  # the buffer is in the way: without the copy it is noise
        assert tokens(deployment, router, 4) != tokens(deployment, alone, 4)
    for _ in range(PAIRS):
        deployment.send("plain")
        deployment.send("slow", {("prefill", "copies.d2h"): SAVE_MS, ("decode", "copies.h2d"): LOAD_MS})
    answers = deployment.answers()
    plain, slow = answers["plain"], answers["slow"]

    for answer in plain + slow:
        programs.assert_exact({**answer.row, "segments": list(answer.segments)})
        assert answer.row["verdict"] == "complete"
        assert min(copied_ms(answer, TO_HOST), copied_ms(answer, TO_DEVICE)) > 0
    assert len(deployment.held_ms["slow"]) == len(plain) == len(slow) == PAIRS
    for told, ms in ((TO_HOST, SAVE_MS), (TO_DEVICE, LOAD_MS)):
        assert min(copied_ms(answer, told) for answer in slow) >= ms
        assert Growth.of(slow, plain, lambda answer, told=told: copied_ms(answer, told)).is_near(ms, NOISE_MS)
    transfer = Growth.of(slow, plain, lambda answer: answer.share_ms("transfer"))
    coordination = Growth.of(slow, plain, lambda answer: answer.share_ms("coordination"))
    assert transfer.is_near(SAVE_MS + LOAD_MS, NOISE_MS), transfer
    assert coordination.low_ms < NOISE_MS, coordination
    check_events(deployment.spool)


def check_events(spool: Path) -> None:
    """Check that every copy has its begin and its end, and says how much it was."""
    read = spooled.read(spool)
    for begun, ended in (
        (stages.PREFILL_COPY_STARTED, stages.PREFILL_COPIED), (stages.DECODE_COPY_STARTED, stages.DECODE_COPIED)
    ):  # fmt: skip
        starts, ends = read.of(begun.code), read.of(ended.code)
        assert len(starts) == len(ends) > 2 * PAIRS
        assert [one.request for one in starts] == [one.request for one in ends]
        assert ends[-1].numbers[:3] == (0, BLOCKS, BLOCKS * BLOCK_BYTES)
    assert not read.of(stages.DISABLED.code)
