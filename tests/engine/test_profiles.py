"""Profiles of real engines under load: every process is there under its labels, and the thread that posts is seen to.

Posts are held up by 100 ms each, since a tiny model's are over before a sampler has looked.
"""

from __future__ import annotations

import pytest

from kvtrace.profiler import STAGE_LABEL, THREAD_LABEL
from tests.engine.deployment import Deployment
from tests.pyroscope_stand_in import Sample, StandIn
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

POSTS, POST_S = 8, 0.1
MOST = 0.7
"""Not all: the sampler looks at a thread's label a moment after its stack, a longer one where processors are busy."""


def test_pull_posts_on_the_forward_thread_of_d(two_ranks: Deployment, profiles: StandIn) -> None:
    posting = post(two_ranks, "decode", profiles)

    assert {sample.labels[THREAD_LABEL] for sample in posting} == {"forward"}
    assert {sample.series["rank"] for sample in posting} == {"0", "1"}
    assert share_below(posting, {"_read_blocks", "start_load_kv"}) > MOST


def test_push_posts_on_the_writer_thread_of_p(few_blocks: Deployment, profiles: StandIn) -> None:
    posting = post(few_blocks, "prefill", profiles)

    assert {sample.labels[THREAD_LABEL] for sample in posting} == {"writer"}
    assert {sample.series["rank"] for sample in posting} == {"0"}
    assert share_below(posting, {"_xfer_blocks", "_push_writer_loop"}) > MOST


def share_below(samples: list[Sample], functions: set[str]) -> float:
    """Return the share of samples' time that passed below all of these functions, named without their classes."""
    below = (one.seconds for one in samples if functions <= {frame.rpartition(".")[2] for frame in one.stack})
    return sum(below) / sum(one.seconds for one in samples)


def post(deployment: Deployment, role: str, profiles: StandIn) -> list[Sample]:
    """Send requests whose posts take long on one side; return the samples of posts, all of that side's workers."""
    before = len(profiles.pushes)
    for _ in range(POSTS):
        deployment.send("profiled", {(role, "nixl.posts"): POST_S * 1000}, 300)
    engines = {engine.role.value: engine.engine_id for engine in deployment.lab.engines}
    expected = {(side, process, engine) for side, engine in engines.items() for process in ("api", "core", "worker")}
    expected.add(("router", "router", ""))
    found: list[Sample] = []

    def is_in() -> bool:
        found[:] = profiles.samples(before)
        whole = expected <= {process_of(sample) for sample in found} and bool(staged("forward"))
        return whole and posted_s(found) > POSTS * POST_S / 3

    def staged(name: str) -> list[Sample]:
        return [sample for sample in found if sample.labels.get(STAGE_LABEL) == name]

    until(is_in)
    posting = staged("post")

    assert {process_of(sample) for sample in found} == expected
    assert {process_of(sample) for sample in posting} == {(role, "worker", engines[role])}
    assert staged("forward")
    return posting


def process_of(sample: Sample) -> tuple[str, str, str]:
    """Return whose sample it is."""
    return sample.series["role"], sample.series["process"], sample.series.get("engine", "")


def posted_s(samples: list[Sample]) -> float:
    """Return the time of posts in the samples, all ranks together."""
    return sum(sample.seconds for sample in samples if sample.labels.get(STAGE_LABEL) == "post")
