"""The observer of vLLM's worker: steps, loads, staged blocks."""

from __future__ import annotations

import itertools
import pickle
import time

import pytest

from instrumented_connectors.step_mark import StepMark
from tests import connector_doubles as doubles
from tests.observers import FIRST_RUNNER, SECOND_RUNNER, stepped, worker


def test_a_step_starts_when_the_worker_takes_it_from_its_queue(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    """What a worker prepares before the first hook belongs to the step: the pickled mark notes when it was taken."""
    worker(memory, connector)
    bound = doubles.metadata()
    before_ns = time.monotonic_ns()
    bound.kvtrace_step = pickle.loads(pickle.dumps(StepMark((7, 5, True, True))))  # noqa: S301 - as vLLM's queue does
    after_ns = time.monotonic_ns()
    time.sleep(0.002)
    connector.bind_connector_metadata(bound)

    assert tuple(bound.kvtrace_step) == (7, 5, True, True)
    assert before_ns <= memory.of("step.started")[0].t_ns <= after_ns


@pytest.mark.parametrize("order", [FIRST_RUNNER, SECOND_RUNNER, ("wait_for_save", "get_transfer_results")])
def test_the_forward_ends_before_the_first_hook_behind_it(
    memory: doubles.Memory, connector: doubles.Connector, order: tuple[str, ...]
) -> None:
    worker(memory, connector)
    stepped(connector, 7, order)

    assert memory.names == ["step.started", "step.forwarded", "step.connected"]
    assert {event.numbers[:2] for event in memory.events} == {(7, 1)}


def test_loads_that_come_first_are_not_behind_the_forward(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(1_000, 10)
    monkeypatch.setattr("instrumented_connectors.worker_side.now_ns", lambda: next(times))
    worker(memory, connector)
    stepped(connector, 7, FIRST_RUNNER, late=False, reqs_to_recv={"r": doubles.meta()})

    assert memory.names == ["step.started", "decode.load_started", "step.forwarded", "step.connected"]
    assert memory.of("step.connected")[0].numbers == (7, 1, 30, 10)


def test_an_empty_step_shows_only_if_something_happens_in_it(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    worker(memory, connector)
    stepped(connector, 1, FIRST_RUNNER, tokens=0)
    assert memory.names == []

    stepped(connector, 2, FIRST_RUNNER, tokens=0, reqs_to_recv={"r": doubles.meta(((1, 2), (3,)))})
    assert memory.names == ["step.started", "decode.load_started", "step.connected"]
    assert memory.of("decode.load_started")[0][1:4] == ("r", (1, 3, 0, 0), "P")

    memory.forget()
    connector.returns["get_transfer_results"] = doubles.results(received={"r"})
    stepped(connector, 3, FIRST_RUNNER, tokens=0)
    assert memory.names == ["decode.reported", "step.started", "step.connected"]


def test_a_load_that_fails_says_so_with_its_blocks(memory: doubles.Memory, connector: doubles.Connector) -> None:
    worker(memory, connector)
    connector.returns["get_transfer_results"] = doubles.results(failed={"r"})
    stepped(connector, 1, FIRST_RUNNER, reqs_to_recv={"r": doubles.meta()})

    assert memory.of("decode.load_failed")[0].numbers == (1, 3, 0, 0)
    assert memory.of("decode.reported") == []


def test_push_queues_registrations_on_d_and_stages_blocks_on_p(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    worker(memory, connector, pulls=False)
    stepped(connector, 1, FIRST_RUNNER, push_registrations={"r": {}}, reqs_to_recv={"r": doubles.meta()})
    stepped(connector, 2, FIRST_RUNNER, push_finished_blocks={"s": ([1],)})

    requests = [(event.stage, event.request) for event in memory.events if event.request]
    assert requests == [("decode.registration_queued", "r"), ("prefill.staged", "s")]


def test_a_worker_whose_scheduler_does_not_trace_still_shows_requests(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    worker(memory, connector)
    connector.bind_connector_metadata(doubles.metadata(reqs_to_recv={"r": doubles.meta()}))
    connector.start_load_kv("context")
    connector.clear_connector_metadata()

    assert memory.names == ["decode.load_started"]
