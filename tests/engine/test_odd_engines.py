"""Engines that are not the usual pair: several ranks, a KV pool too small, prefix caches, and a lease of seconds.

Two labs carry all of it: pull, with two ranks on D against one on P; and push, with few blocks on D.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Deployments
from tests.engine.deployment import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LEASE_S = 4
BLOCK_TOKENS = 128


@pytest.fixture(scope="module")
def two_ranks(deployments: Deployments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Run a pull lab whose D has two ranks."""
    deployments.close()
    with Deployment(
        "pull",
        tmp_path_factory.mktemp("two-ranks"),
        prefix_caching=True,
        extra_config={"kv_lease_duration": LEASE_S},
        overrides={"decode": {"tensor_parallel_size": 2}},
    ) as one:
        yield one


@pytest.fixture(scope="module")
def few_blocks(deployments: Deployments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Run a push lab whose D has blocks for three requests of 380 tokens."""
    deployments.close()
    with Deployment(
        "push",
        tmp_path_factory.mktemp("few-blocks"),
        prefix_caching=True,
        overrides={"decode": {"arguments": ("--max-model-len", "1024", "--num-gpu-blocks-override", "10")}},
    ) as one:
        yield one
