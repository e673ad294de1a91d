"""Which stage each call of a connector is labelled with, on doubles of vLLM's parts."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instrumented_connectors import middleware, profiling, traced
from instrumented_connectors.scheduler_side import STEP_ATTRIBUTE
from instrumented_connectors.step_mark import StepMark
from kvtrace import profiler
from tests.connector_doubles import Connector, Memory

CALLS = {**profiling._SCHEDULER, **profiling._FORWARD_THREAD}


class Recording(profiler.Profiler):
    """A profiler that tells which stage its thread is in."""

    def __init__(self) -> None:
        self.present: list[str] = []
        super().__init__(self._added, self._removed, {})

    def _added(self, name: str, value: str) -> None:
        if name == profiler.STAGE_LABEL:
            self.present.append(value)

    def _removed(self, name: str, value: str) -> None:
        if name == profiler.STAGE_LABEL:
            self.present.remove(value)


class Agent:
    """A NIXL agent whose calls return the stage in which they are made."""

    def __init__(self, found: Recording) -> None:
        for name in profiling._AGENT:
            setattr(self, name, lambda: list(found.present))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    monkeypatch.setattr(profiler, "start", lambda _labels, _facts: recording)
    return recording


def attached(found: Recording) -> Any:
    connector: Any = Connector()
    for name in (*Connector.SCHEDULER, *Connector.WORKER):
        setattr(connector, name, lambda *_args: list(found.present))
    wake, stop = threading.Event(), threading.Event()
    wake.wait = stop.wait = lambda: list(found.present)  # type: ignore[method-assign,assignment]
    connector.connector_scheduler = object()
    connector.connector_worker = SimpleNamespace(
        tp_rank=1, nixl_wrapper=Agent(found), _push_writer_wake=wake, _push_writer_stop=stop,
        _nixl_handshake=lambda: list(found.present), _do_start_push_kv=lambda: list(found.present),
    )  # fmt: skip
    connector.engine_id = "e0"
    connector.kv_transfer_config = SimpleNamespace(kv_role="kv_consumer")
    profiling.attach(connector, SimpleNamespace(parallel_config=SimpleNamespace()), Memory())
    return connector


def test_every_call_is_labelled_with_its_stage_and_unlabelled_behind_it(found: Recording) -> None:
    connector = attached(found)
    worker = connector.connector_worker

    for name, stage in CALLS.items():
        assert getattr(connector, name)() == [stage]
    for name, stage in profiling._AGENT.items():
        assert getattr(worker.nixl_wrapper, name)() == [stage]
    assert worker._nixl_handshake() == ["handshake"]
    assert worker._do_start_push_kv() == ["push"]
    assert worker._push_writer_wake.wait() == worker._push_writer_stop.wait() == ["sleep"]
    assert found.present == []


def test_the_stages_are_those_of_the_vocabulary() -> None:
    used = {*CALLS.values(), *profiling._AGENT.values(), "handshake", "push", "sleep", profiler.FORWARD}

    assert used == set(profiler.STAGES)


def test_the_stages_are_documented_with_their_class() -> None:
    """One row of docs/profiles.md for each, or for several of one class."""
    text = (Path(__file__).parent.parent / "docs" / "profiles.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    documented = {name: kind.strip() for names, kind in rows for name in re.findall(r"`(\w+)`", names)}

    assert {name: kind or "none" for name, kind in profiler.STAGES.items()}.items() <= documented.items()


@pytest.mark.parametrize("late", [True, False])
def test_the_forward_lasts_to_the_first_hook_behind_it(found: Recording, late: bool) -> None:
    """Loads that must come first are in the forward's time, and give the thread back to it."""
    connector = attached(found)
    metadata = SimpleNamespace(**{STEP_ATTRIBUTE: StepMark((1, 600, late, True))})

    connector.bind_connector_metadata(metadata)
    assert found.present == ["forward"]
    connector.start_load_kv(None)
    assert found.present == ([] if late else ["forward"])
    connector.wait_for_save()
    assert found.present == []
    connector.bind_connector_metadata(SimpleNamespace(**{STEP_ATTRIBUTE: StepMark((2, 0, late, False))}))
    assert found.present == []


def test_a_call_that_fails_leaves_no_label(found: Recording) -> None:
    target = SimpleNamespace(fail=lambda: 1 / 0)
    profiling.label(target, "fail", "post", found)

    with pytest.raises(ZeroDivisionError):
        target.fail()
    assert found.present == []


def test_processes_are_labelled_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = SimpleNamespace(
        connector_worker=SimpleNamespace(tp_rank=3),
        engine_id="e0",
        kv_transfer_config=SimpleNamespace(kv_role="kv_producer"),
    )
    several = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="mp"))
    single = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="uni"))
    expected = {"role": "prefill", "process": "worker", "engine": "e0", "rank": "3", "connector": "SimpleNamespace"}

    assert profiling._labels(connector, several) == expected
    assert profiling._labels(connector, single) == expected | {"process": "core"}
    connector.connector_worker = None
    assert profiling._labels(connector, several) == expected | {"process": "core", "rank": ""}


def test_nothing_that_is_wrong_with_profiles_reaches_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiler, "start", lambda _labels, _facts: 1 / 0)

    traced._profile(SimpleNamespace(), SimpleNamespace(), Memory())

    assert "serving goes on" in caplog.text


async def test_an_api_server_is_profiled_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    transfer = SimpleNamespace(kv_role="kv_producer", engine_id="e0", kv_connector="NixlPushConnector")
    state = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    app = SimpleNamespace(state=state)

    async def served(*_arguments: object) -> None:
        pass

    monkeypatch.setattr(profiler, "start", lambda labels, _facts: started.append(labels))
    traced_app = middleware.TraceMiddleware(served)
    monkeypatch.setattr(traced_app, "tracer", Memory())
    scope = {"type": "lifespan", "app": app}
    await traced_app(scope, served, served)  # type: ignore[arg-type]
    assert started == []
    monkeypatch.setenv(profiler.VARIABLE, "http://127.0.0.1:1")
    await traced_app(scope, served, served)  # type: ignore[arg-type]

    assert started == [{"role": "prefill", "process": "api", "engine": "e0", "connector": "NixlPushConnector"}]
