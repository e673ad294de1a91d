"""The lab's own promises on real engines: answers that tell hand-offs apart, and that a hand-off does not change."""

from __future__ import annotations

import pytest

from kvtrace.lab import metrics, workload
from kvtrace.report import totals
from kvtrace.store import Store
from tests.engine.deployment import Deployment

pytestmark = pytest.mark.engine
PROMPTS = 10


def _alone(deployment: Deployment, load: dict[str, object]) -> list[tuple[int, ...]]:
    """Return the answers that prompts get from one engine, one at a time, with no hand-off."""
    url = deployment.lab.engines[1].url
    result = workload.run(url, quiet=True, concurrency=1, rate_qps=float("inf"), **load)
    assert len(result.completed) == load["requests"]
    return [record.token_ids for record in result.records]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_answers_depend_on_the_prompt_and_not_on_the_hand_off(deployment: Deployment) -> None:
    load = {"requests": PROMPTS, "input_len": 200, "output_len": 8, "seed": 5}

    handed_over = workload.run(deployment.lab.url, quiet=True, rate_qps=8.0, **load)

    assert [record.error for record in handed_over.records] == [""] * PROMPTS
    assert [record.token_ids for record in handed_over.records] == _alone(deployment, load)
    assert len({record.token_ids for record in handed_over.records}) >= 8


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_vllms_own_totals_are_those_of_the_store(deployment: Deployment) -> None:
    """Since the engines started: every request, prompt token, transfer and byte is in both, or a reason is known."""
    driver = {"push": "prefill", "pull": "decode"}[deployment.mode]
    deployment.send("counted", prompt_tokens=100)
    said = metrics.read(deployment.lab.engines)
    with Store.open(deployment.record(), "read") as store:
        found = totals.totals(store, totals.facts(said))
    by_name = {(one.engine.rpartition("-")[0].rpartition("-")[2], one.name): one for one in found}

    assert {engine for engine, _ in by_name} == {"prefill", "decode"}
    assert [one for one in found if not one.is_explained] == []
    assert [one for one in found if one.vllm is None] == []
    for name in ("transfers", "bytes"):
        assert by_name[driver, name].agrees
        assert by_name[driver, name].kvtrace > 0
    for engine in ("prefill", "decode"):
        assert by_name[engine, "requests finished"].agrees
        assert by_name[engine, "prompt tokens"].kvtrace > 0
