"""The mixin over a stand-in for vLLM's connector: watched while tracing is on, else exactly the connector it is."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from instrumented_connectors import traced
from kvtrace import emit
from tests import connector_doubles as doubles

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_rank=0),
    model_config=SimpleNamespace(model="tiny"),
)


class Worker(doubles.PushWorker):
    """A worker with the attributes that are read, and an agent."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_rank = 1
        self.device_type = "cpu"
        self.nixl_wrapper: Any = doubles.Agent()

    def _nixl_handshake(self, *_args: Any) -> None:
        """Do nothing."""


class Stock(doubles.Connector):
    """A connector as vLLM constructs it: one side or the other."""

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        super().__init__()
        self.given = (vllm_config, role, kv_cache_config)
        self.engine_id = "P"
        self.kv_transfer_config = SimpleNamespace(
            kv_role="kv_producer", get_from_extra_config=lambda _name, default: default
        )
        self.connector_scheduler = object() if role == "scheduler" else None
        self.connector_worker = Worker() if role == "worker" else None


class NixlPushConnector(traced.Traced, Stock):
    """The class under test, under the name that users see."""

    kvtrace_mode = "push"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> doubles.Memory:
    memory = doubles.Memory()
    monkeypatch.setattr(emit, "tracer", lambda: memory)
    monkeypatch.setattr(traced, "_pipeline_rank", lambda: 0)
    monkeypatch.setattr(traced, "_kinds", set())
    monkeypatch.setattr(traced, "_workers", [])
    monkeypatch.setattr(traced, "_serving", weakref.WeakSet())
    return memory


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect what vLLM's log is told, at the level that it has by default."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(f"{record.levelname} {record.getMessage()}"))
    log = logging.getLogger("vllm.kvtrace")
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
    log.setLevel(before)


def hooks(connector: Any) -> set[str]:
    """Return the names of the hooks that are watched."""
    names = (*doubles.Connector.SCHEDULER, *doubles.Connector.WORKER)
    return {name for name in names if hasattr(getattr(connector, name), "__wrapped__")}


def test_off_nothing_is_wrapped(memory: doubles.Memory) -> None:
    memory.enabled = False
    for role in ("scheduler", "worker"):
        connector = NixlPushConnector(CONFIG, role, kv_cache_config="cache")

        assert hooks(connector) == set()
        assert connector.given == (CONFIG, role, "cache")
    assert type(connector.connector_worker.nixl_wrapper) is doubles.Agent
    assert memory.facts == {}


def test_a_scheduler_has_its_hooks_watched_and_states_its_facts(memory: doubles.Memory) -> None:
    connector = NixlPushConnector(CONFIG, "scheduler", "cache")

    assert hooks(connector) == set(doubles.Connector.SCHEDULER)
    assert memory.facts["kind"] == "core"
    assert {memory.facts[name] for name in ("engine_id", "role", "mode", "connector", "model", "tp_size")} == {
        "P", "kv_producer", "push", "NixlPushConnector", "tiny", "2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("narrower", "limits"),
    [
        ({}, ("2048", "16", "900")),
        ({"max_num_scheduled_tokens": 1024, "max_num_active_seqs": 8}, ("1024", "8", "900")),
        ({"max_num_scheduled_tokens": None, "max_num_active_seqs": None}, ("2048", "16", "900")),
    ],
    ids=["by its flags", "by narrower limits", "by its flags, where a release knows of narrower limits"],
)
def test_a_scheduler_states_its_limits(
    memory: doubles.Memory, narrower: dict[str, int | None], limits: tuple[str, ...]
) -> None:
    scheduler = SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=16, **narrower)
    NixlPushConnector(
        SimpleNamespace(**vars(CONFIG), scheduler_config=scheduler), "scheduler", SimpleNamespace(num_blocks=900)
    )

    assert tuple(memory.facts[name] for name in ("max_num_batched_tokens", "max_num_seqs", "kv_blocks")) == limits


def test_a_scheduler_that_says_no_limits_is_watched_all_the_same(memory: doubles.Memory) -> None:
    NixlPushConnector(CONFIG, "scheduler", "cache")

    assert memory.enabled
    assert not {"max_num_batched_tokens", "max_num_seqs", "kv_blocks"} & set(memory.facts)


def test_a_worker_has_its_hooks_its_agent_and_its_sender_watched(memory: doubles.Memory) -> None:
    connector = NixlPushConnector(CONFIG, "worker", "cache")
    inner = connector.connector_worker
    inner._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    inner.nixl_wrapper.get_new_notifs()

    assert hooks(connector) == set(doubles.Connector.WORKER)
    assert memory.facts["kind"] == "worker"
    assert (memory.facts["rank"], memory.facts["device"]) == ("1", "cpu")
    assert "missing" not in memory.facts
    assert memory.names == ["transfer.matched"]


def test_a_worker_states_by_which_ways_its_bytes_go(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends of the agent, transports and devices of UCX; what nobody set is no fact."""
    monkeypatch.setattr(doubles.Agent, "backends", {"UCX": 1, "GDS": 2}, raising=False)
    monkeypatch.setenv("UCX_TLS", "tcp,self,sm")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    NixlPushConnector(CONFIG, "worker", "cache")

    assert (memory.facts["nixl_backends"], memory.facts["ucx_tls"]) == ("UCX,GDS", "tcp,self,sm")
    assert "ucx_net_devices" not in memory.facts


def test_children_of_a_multi_connector_say_which_they_are(memory: doubles.Memory) -> None:
    children = [NixlPushConnector(CONFIG, "worker", "cache") for _ in range(2)]
    for child in children:
        child.returns["get_transfer_results"] = doubles.results(received={"r"})
        child.get_transfer_results(set())

    assert [event.numbers for event in memory.of("decode.reported")] == [(1, 0, 0, 0), (1, 1, 0, 0)]
    assert memory.facts["connectors"] == "NixlPushConnector,NixlPushConnector"


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_an_engine_that_takes_anothers_place_in_its_process_is_the_first_again(
    memory: doubles.Memory, *, is_shut_down: bool
) -> None:
    """Also where nobody shut the one before down, and it is only gone."""
    for _ in range(3):
        connector = NixlPushConnector(CONFIG, "worker", "cache")
        connector.returns["get_transfer_results"] = doubles.results(received={"r"})
        connector.get_transfer_results(set())
        if is_shut_down:
            connector.shutdown()
        else:
            del connector
            gc.collect()

    assert [event.numbers for event in memory.of("decode.reported")] == [(1, 0, 0, 0)] * 3
    assert len(traced._workers) == 1
    assert "connectors" not in memory.facts


def test_an_engine_in_one_process_is_called_core(memory: doubles.Memory) -> None:
    NixlPushConnector(CONFIG, "scheduler", "cache")
    NixlPushConnector(CONFIG, "worker", "cache")

    assert memory.facts["kind"] == "core"


def test_what_a_release_lacks_is_a_fact(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Worker, "_nixl_handshake")
    NixlPushConnector(CONFIG, "worker", "cache")

    assert memory.facts["missing"] == "_nixl_handshake"
    assert memory.enabled


def test_a_connector_that_cannot_be_watched_serves_untraced(
    memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "AgentSide", lambda *_: 1 // 0)
    connector = NixlPushConnector(CONFIG, "worker", "cache")
    connector.start_load_kv("context")

    assert memory.disabled == [("attach", "integer division or modulo by zero")]
    assert connector.calls == ["start_load_kv"]


def test_each_side_says_once_in_vllms_log_where_its_events_go(
    memory: doubles.Memory, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(emit.SPOOL_VARIABLE, "/var/tmp/kvtrace")
    for side in ("scheduler", "worker"):
        NixlPushConnector(CONFIG, side, "cache")

    assert said == [
        f"INFO kvtrace: NixlPushConnector ({side}) is traced; events go to /var/tmp/kvtrace"
        for side in ("scheduler", "worker")
    ]


@pytest.mark.parametrize("why", ["off", "attach fails"])
def test_nothing_is_said_of_a_connector_that_is_not_traced(
    why: str, memory: doubles.Memory, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.enabled = why != "off"
    monkeypatch.setattr(traced, "AgentSide", lambda *_: 1 // 0)
    NixlPushConnector(CONFIG, "worker", "cache")

    assert not memory.enabled
    assert said == []


def test_a_log_that_raises_leaves_the_connector_traced(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced._vllm_log, "info", lambda *_: 1 // 0)
    connector = NixlPushConnector(CONFIG, "worker", "cache")

    assert memory.enabled
    assert hooks(connector) == set(doubles.Connector.WORKER)
