"""What the observer of vLLM's worker asks of the kernel: how long its thread had no processor in a step."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from instrumented_connectors.device_clock import DeviceClock
from instrumented_connectors.step_mark import StepMark
from tests import connector_doubles as doubles
from tests.observers import FIRST_RUNNER, stepped, worker


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the kernel's count for the thread, ns, and how often it was asked: a test sets and reads them."""
    counted = [0, 0]

    def starved_ns() -> int:
        counted[1] += 1
        return counted[0]

    for module in ("worker_side", "step_mark"):
        monkeypatch.setattr(f"instrumented_connectors.{module}.starved_ns", starved_ns)
    return counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the time, ns, which a test sets."""
    clock = [1_000_000_000]
    for module in ("worker_side", "step_mark"):
        monkeypatch.setattr(f"instrumented_connectors.{module}.now_ns", lambda: clock[0])
    return clock


def passes(connector: doubles.Connector, clock: list[int], counted: list[int], hook: str, ms: int, lacks: int) -> None:
    """Let that hook of vLLM's take some time, in which the thread lacks a processor for a part of it (both in ms)."""

    def call(*_args: Any) -> Any:
        clock[0] += ms * 1_000_000
        counted[0] += lacks * 1_000_000
        return doubles.results()

    setattr(connector, hook, call)


def forward(clock: list[int], counted: list[int], ms: int, lacks: int) -> None:
    """Let a forward take some time, in which the thread lacks a processor for a part of it (both in ms)."""
    clock[0] += ms * 1_000_000
    counted[0] += lacks * 1_000_000


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ((7, 2), [(7_000_000, 2_000_000)]),
        ((7, 0), [(7_000_000, 0)]),
        ((90, 90), [(20_000_000, 4_000_000)]),
        ((0, 0), []),
    ],
    ids=["both", "the forward", "more than it took", "nothing"],
)
def test_a_step_says_how_long_its_thread_had_no_processor(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int],
    lacks: tuple[int, int], told: list[tuple[int, int]],
) -> None:  # fmt: skip
    """In a forward of 20 ms and 4 ms of the connector behind it; three readings a step, and none where it is empty."""
    passes(connector, clock, counted, "start_load_kv", 4, lacks[1])
    worker(memory, connector)
    counted[0] = 50_000_000
    mark = pickle.loads(pickle.dumps(StepMark((7, 5, True, True))))  # noqa: S301 - as vLLM's queue does
    bound = doubles.metadata()
    bound.kvtrace_step = mark
    counted[0] += 1_000_000  # what it lacked before it was bound is the step's too
    clock[0] += 2_000_000
    connector.bind_connector_metadata(bound)
    forward(clock, counted, 18, lacks[0] - 1 if lacks[0] else -1)
    for hook in FIRST_RUNNER:
        getattr(connector, hook)(*(["context"] if hook == "start_load_kv" else []))
    connector.clear_connector_metadata()

    assert [event.numbers for event in memory.of("step.worker_starved")] == [(7, 1, *one) for one in told]
    assert counted[1] == 3
    stepped(connector, 8, FIRST_RUNNER, tokens=0)
    assert counted[1] == 3


def test_a_step_says_how_long_its_result_waited_for_a_processor(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From the end of the connector's work until it is handed over, once a step; what is no result says nothing."""
    handed: list[object] = []

    class WorkerProc:
        def handle_output(self, output: object) -> None:
            handed.append(output)

    monkeypatch.setitem(sys.modules, "vllm.v1.executor.multiproc_executor", SimpleNamespace(WorkerProc=WorkerProc))
    worker(memory, connector)
    process = WorkerProc()
    for step, lacks in ((7, 3), (8, 0)):
        stepped(connector, step, FIRST_RUNNER)
        process.handle_output(None)
        forward(clock, counted, 5, lacks)
        process.handle_output("tokens")
        forward(clock, counted, 5, 5)
        process.handle_output("what somebody else asked for")
    stepped(connector, 9, FIRST_RUNNER, tokens=0)
    process.handle_output("nothing to do")

    assert [event.numbers for event in memory.of("step.result_starved")] == [(7, 1, 3_000_000, 0)]
    assert len(handed) == 7


def test_the_kernel_is_not_asked_where_nothing_is_worth_telling(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int]
) -> None:
    """Of 0.08 ms of the connector's work; the result is not charged with what that may have lacked."""
    worker(memory, connector)
    mark = StepMark((7, 5, True, True))
    bound = doubles.metadata()
    bound.kvtrace_step = mark
    connector.bind_connector_metadata(bound)
    connector.wait_for_save()
    clock[0] += 80_000
    counted[0] += 70_000
    connector.clear_connector_metadata()
    clock[0] += 50_000
    assert (mark.starved_since_ns(clock[0]), counted[1]) == (0, 2)
    clock[0] += 5_000_000
    counted[0] += 2_000_000

    assert mark.starved_since_ns(clock[0]) == 1_990_000
    assert memory.of("step.worker_starved") == []
    assert counted[1] == 3


def test_what_the_connector_lacks_before_the_forward_is_not_the_forwards(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int]
) -> None:
    passes(connector, clock, counted, "start_load_kv", 4, 3)
    worker(memory, connector)
    stepped(connector, 7, FIRST_RUNNER, late=False)

    assert memory.of("step.worker_starved") == []
    assert memory.of("step.connected")[0].numbers == (7, 1, 4_000_000, 4_000_000)


def test_what_lies_between_forward_and_connector_is_neither_ones(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int]
) -> None:
    """A draft model takes 5 ms between two hooks: of 7 ms without a processor 2 at least were the connector's."""
    passes(connector, clock, counted, "wait_for_save", 4, 0)
    worker(memory, connector)
    bound = doubles.metadata()
    bound.kvtrace_step = StepMark((7, 5, True, True))
    connector.bind_connector_metadata(bound)
    connector.start_load_kv("context")
    forward(clock, counted, 5, 7)
    connector.wait_for_save()
    connector.clear_connector_metadata()

    assert [event.numbers for event in memory.of("step.worker_starved")] == [(7, 1, 0, 2_000_000)]


@pytest.mark.parametrize(
    ("lacks_ms", "beside_ms", "told_ms"), [(7, 0, 4), (7, 2, 6), (2, 0, 0), (90, 0, 20)],
    ids=["more than the rest of the step", "some of it beside", "perhaps all beside", "more than it took"],
)  # fmt: skip
def test_a_step_that_only_decodes_asks_once_and_tells_what_its_forward_must_have_lacked(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int], lacks_ms: int,
    beside_ms: int, told_ms: int,
) -> None:  # fmt: skip
    """A forward of 20 ms; 1 ms of the connector and 2 ms between two steps may have lacked a processor as well."""
    passes(connector, clock, counted, "start_load_kv", 1, 0)
    worker(memory, connector)
    for step, lacked_ms in ((7, 0), (8, lacks_ms)):
        bound = doubles.metadata()
        bound.kvtrace_step = StepMark((step, 5, True, False))
        connector.bind_connector_metadata(bound)
        forward(clock, counted, 20, lacked_ms)
        connector.start_load_kv("context")
        connector.clear_connector_metadata()
        forward(clock, counted, 2, beside_ms)

    told = [event.numbers for event in memory.of("step.worker_starved")]
    assert told == ([(8, 1, told_ms * 1_000_000, 0)] if told_ms else [])
    assert counted[1] == 2


def test_a_step_that_only_decodes_on_a_device_asks_nothing(
    memory: doubles.Memory, connector: doubles.Connector, counted: list[int]
) -> None:
    device = doubles.Device()
    worker(memory, connector, device_clock=DeviceClock(device, device.now))
    stepped(connector, 7, FIRST_RUNNER, prompt=False)
    assert counted[1] == 0


def test_a_host_thread_without_a_processor_does_not_say_that_its_device_had_no_work(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int]
) -> None:
    device = doubles.Device()
    passes(connector, clock, counted, "wait_for_save", 4, 1)
    worker(memory, connector, device_clock=DeviceClock(device, device.now))
    bound = doubles.metadata()
    bound.kvtrace_step = StepMark((7, 5, True, True))
    connector.bind_connector_metadata(bound)
    forward(clock, counted, 20, 15)
    connector.wait_for_save()
    connector.clear_connector_metadata()

    assert [event.numbers for event in memory.of("step.worker_starved")] == [(7, 1, 0, 1_000_000)]
