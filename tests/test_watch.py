"""Watching a method of vLLM: it answers as before, whatever goes wrong in tracing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from instrumented_connectors.watch import Bounded, watch
from instrumented_connectors.worker_side import WorkerSide
from tests import connector_doubles as doubles
from tests.observers import agent, read, scheduler, stepped, worker

SECOND_RUNNER = ("finish_forward", "start_load_kv", "wait_for_save", "get_transfer_results")


# Watching ----------------------------------------------------------------------------------------


def test_a_watched_method_is_called_once_and_answers_as_before(memory: doubles.Memory) -> None:
    seen = []
    target = SimpleNamespace(add=lambda a, b=1: a + b)
    watch(target, "add", memory, before=lambda a, b=1: (a, b), after=lambda *args, **kw: seen.append((*args, kw)))

    assert target.add(2, b=3) == 5
    assert seen == [((2, 3), 5, 2, {"b": 3})]


def test_an_exception_of_vllms_passes_through(memory: doubles.Memory) -> None:
    seen = []
    target = doubles.Connector()
    target.returns["shutdown"] = KeyError("vLLM's own")
    watch(target, "shutdown", memory, failed=lambda token, error: seen.append((token, str(error))))

    with pytest.raises(KeyError, match="vLLM's own"):
        target.shutdown()
    assert seen == [(None, '"vLLM\'s own"')]
    assert memory.enabled


def test_an_observer_that_raises_ends_tracing_and_nothing_else(memory: doubles.Memory) -> None:
    for moment in ("before", "after"):
        memory.enabled = True
        calls = []
        target = SimpleNamespace(work=lambda calls=calls: calls.append(1) or "done")
        watch(target, "work", memory, **{moment: lambda *_: 1 // 0})

        assert (target.work(), target.work()) == ("done", "done")
        assert calls == [1, 1]
    assert memory.disabled == [("SimpleNamespace.work", "integer division or modulo by zero")] * 2


def test_a_method_that_a_release_lacks_is_a_fact(memory: doubles.Memory) -> None:
    watch(doubles.Agent(), "no_such_method", memory, before=print)

    watch(doubles.Agent, "nor_such", memory, before=print)

    assert memory.facts == {"missing.no_such_method": "Agent", "missing.nor_such": "Agent"}


def test_what_is_remembered_of_requests_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "LIMIT", 3)
    bounded = Bounded()
    for number in range(5):
        bounded[str(number)] = number

    assert list(bounded) == ["2", "3", "4"]


# Whatever goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("hook", doubles.Connector.SCHEDULER)
def test_a_scheduler_hook_that_meets_the_unexpected_serves_on(
    memory: doubles.Memory, connector: doubles.Connector, hook: str
) -> None:
    scheduler(memory, connector)
    connector.returns[hook] = answer = object()
    got = getattr(connector, hook)("neither", "what", "is expected")

    assert got is answer
    assert connector.calls == [hook]
    assert len(memory.disabled) == 1


@pytest.mark.parametrize(
    "observer",
    ["_bound", "_behind_forward", "_before_load", "_after_load", "_after_hook", "_after_results", "_cleared"],
)
def test_a_worker_hook_that_fails_in_tracing_serves_on(
    memory: doubles.Memory, connector: doubles.Connector, observer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSide, observer, lambda *_: 1 // 0)
    worker(memory, connector)
    stepped(connector, 1, SECOND_RUNNER)
    stepped(connector, 2, SECOND_RUNNER)

    assert connector.calls == ["bind_connector_metadata", *SECOND_RUNNER, "clear_connector_metadata"] * 2
    assert len(memory.disabled) == 1


@pytest.mark.parametrize("call", sorted({"make_prepped_xfer", "transfer", "check_xfer_state", "get_new_notifs"}))
def test_an_agent_call_that_fails_in_tracing_serves_on(memory: doubles.Memory, call: str) -> None:
    _, proxy, inner = agent(memory)
    inner.states, inner.notifications = ["DONE"], {"p": [b"r:1"]}
    proxy.prep_xfer_dlist("NIXL_INIT_AGENT", [(0, 100, 0)])
    handle = read(proxy)
    memory.emit = lambda *_: 1 // 0  # type: ignore[method-assign]
    answers = {
        "make_prepped_xfer": lambda: read(proxy).operation == "READ",
        "transfer": lambda: proxy.transfer(handle) == "PROC",
        "check_xfer_state": lambda: proxy.check_xfer_state(handle) == "DONE",
        "get_new_notifs": lambda: proxy.get_new_notifs() == {"p": [b"r:1"]},
    }

    assert answers[call]()
    assert [where for where, _ in memory.disabled] == [f"Forwarder.{call}"]
