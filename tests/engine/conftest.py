"""Engines shared by tests: one lab at a time, push first, closed before the next one starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtrace import profiler
from tests.engine import template
from tests.engine.deployment import Deployment
from tests.otlp_receiver import Received, over_grpc, over_http
from tests.pyroscope_stand_in import StandIn, stand_in

_MODES = ("push", "pull")
_ODD = ("two_ranks", "few_blocks")
"""Fixtures of labs that are not the usual pair."""


class Deployments:
    """Hands out labs by name, and closes the other one first: two cores carry one lab."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._open: tuple[str, Deployment] | None = None

    def get(self, mode: str, name: str = "", **options: Any) -> Deployment:
        """Return the running lab of this name (its mode's, unless given), started with the options if need be."""
        name = name or mode
        if self._open is None or self._open[0] != name or self._open[1].lab.failed():
            self.close()
            self._started += 1
            folder = self._folder / f"{self._started}-{name}"
            self._open = (name, Deployment(mode, folder, **options).__enter__())
        return self._open[1]

    def close(self) -> None:
        """Close the lab that runs, if one does."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of one lab together, those that break its engines last, so that each lab starts once.

    Those that send hundreds of requests come before these, since the others record all that the lab has emitted so far.
    Tests with engines of their own come behind all of them.
    """
    positions = [position for position, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ordered = sorted((items[position] for position in positions), key=_turn)
    for position, item in zip(positions, ordered, strict=True):
        items[position] = item


def _turn(item: pytest.Item) -> tuple[int, bool, bool]:
    mode, fixtures = _mode(item), getattr(item, "fixturenames", ())
    labs = (*_MODES, *_ODD)
    name = mode or next((name for name in _ODD if name in fixtures), "")
    return (labs.index(name) if name else len(labs), "spent_deployment" in fixtures, "measurements" in fixtures)


def _mode(item: pytest.Item) -> str:
    """Return the mode that a test of this folder is about, "" for others."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or Path(__file__).parent not in item.path.parents:
        return ""
    mode = callspec.params.get("mode", "")
    return mode if mode in _MODES else ""


@pytest.fixture(scope="session")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployments]:
    """Hand out labs; none is left at the end."""
    labs = Deployments(tmp_path_factory.mktemp("labs"))
    with template.forking():
        yield labs
        labs.close()


@pytest.fixture
def deployment(deployments: Deployments, mode: str) -> Deployment:
    """Return the lab of the test's mode."""
    return deployments.get(mode)


@pytest.fixture
def spent_deployment(deployments: Deployments, mode: str) -> Iterator[Deployment]:
    """Return the lab of the test's mode, which the test may break."""
    yield deployments.get(mode)
    deployments.close()


@pytest.fixture(scope="session")
def http_spans() -> Iterator[Received]:
    """Return what an OTLP receiver gets over HTTP from the lab whose D has two ranks."""
    with over_http() as received:
        yield received


@pytest.fixture(scope="session")
def grpc_spans() -> Iterator[Received]:
    """Return what an OTLP receiver gets over gRPC from the lab whose D has few blocks."""
    with over_grpc() as received:
        yield received


@pytest.fixture(scope="session")
def profiles() -> Iterator[StandIn]:
    """Return what a stand-in for a Pyroscope server gets from both odd labs."""
    with stand_in() as found:
        yield found


@pytest.fixture
def two_ranks(deployments: Deployments, http_spans: Received, profiles: StandIn) -> Deployment:
    """Return a pull lab whose D has two ranks."""
    endpoint = f"{http_spans.endpoint}/v1/traces"
    overrides = {"decode": {"tensor_parallel_size": 2}}
    return deployments.get("pull", "two-ranks", overrides=overrides, **_odd(endpoint, "http/protobuf", profiles))


@pytest.fixture
def few_blocks(deployments: Deployments, grpc_spans: Received, profiles: StandIn) -> Deployment:
    """Return a push lab whose D has blocks for three requests of 380 tokens."""
    odd = _odd(grpc_spans.endpoint.replace("grpc://", "http://"), "grpc", profiles)
    few = ("--max-model-len", "1024", "--num-gpu-blocks-override", "10")
    return deployments.get("push", "few-blocks", overrides={"decode": {"arguments": odd["arguments"] + few}}, **odd)


def _odd(endpoint: str, protocol: str, profiles: StandIn) -> dict[str, Any]:
    """Return what both odd labs have: prefix caches, all blocks checked, vLLM's own spans and profiles sent away."""
    profiled = {profiler.VARIABLE: profiles.url, profiler.UPLOAD_VARIABLE: "1"}
    variables = {
        **profiled,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    return {
        "warm_up": 2,
        "prefix_caching": True,
        "verify_kv": 1.0,
        "arguments": ("--otlp-traces-endpoint", endpoint),
        "environment": {"prefill": variables, "decode": variables, "router": {**profiled, "KVTRACE_SPANS": "1"}},
    }
