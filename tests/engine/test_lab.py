"""The lab's own promises on real engines: answers that tell hand-offs apart, and that a hand-off does not change."""

from __future__ import annotations

import pytest

from kvtrace.lab import workload
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
