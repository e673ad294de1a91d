"""The observers of vLLM's worker: steps, forwards on a device, loads, leases."""

from __future__ import annotations

import itertools
import pickle
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from instrumented_connectors.device_clock import DeviceClock
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.step_mark import StepMark
from tests import connector_doubles as doubles
from tests.observers import stepped, worker


@pytest.fixture
def memory() -> doubles.Memory:
    return doubles.Memory()


@pytest.fixture
def connector() -> doubles.Connector:
    return doubles.Connector()


# Worker ------------------------------------------------------------------------------------------


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


FIRST_RUNNER = ("start_load_kv", "wait_for_save", "get_transfer_results")


SECOND_RUNNER = ("finish_forward", "start_load_kv", "wait_for_save", "get_transfer_results")


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
    device = Device()
    worker(memory, connector, device_clock=DeviceClock(device, device.now))
    stepped(connector, 7, FIRST_RUNNER, prompt=False)
    assert counted[1] == 0


def test_a_host_thread_without_a_processor_does_not_say_that_its_device_had_no_work(
    memory: doubles.Memory, connector: doubles.Connector, clock: list[int], counted: list[int]
) -> None:
    device = Device()
    passes(connector, clock, counted, "wait_for_save", 4, 1)
    worker(memory, connector, device_clock=DeviceClock(device, device.now))
    bound = doubles.metadata()
    bound.kvtrace_step = StepMark((7, 5, True, True))
    connector.bind_connector_metadata(bound)
    forward(clock, counted, 20, 15)
    connector.wait_for_save()
    connector.clear_connector_metadata()

    assert [event.numbers for event in memory.of("step.worker_starved")] == [(7, 1, 0, 1_000_000)]


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


# Leases ------------------------------------------------------------------------------------------


def held(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch, now: int = 1_000) -> tuple[Holdings, list[int]]:
    """Return holdings with a lease on request r that ends at 2 s, and the clock, in ns."""
    clock = [now]
    monkeypatch.setattr("instrumented_connectors.holdings.now_ns", lambda: clock[0])
    holdings = Holdings(memory, 1, extension_ns=3_000_000_000)
    step = doubles.metadata(reqs_in_batch={"r"}, reqs_to_send={"r": 102.0}, scheduler_clock=100.0)
    holdings.take(step)
    holdings.lease(step)
    return holdings, clock


def test_a_lease_that_nobody_reads_expires(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, clock = held(memory, monkeypatch)
    clock[0] = 2_000_001_000
    holdings.settle(doubles.results(sent={"r"}))

    assert memory.of("prefill.lease_started")[0].numbers == (1, 2_000_000_000, 0, 0)
    assert memory.names == ["prefill.lease_started", "prefill.lease_expired"]


def test_a_lease_that_was_read_ends_without_expiring(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, clock = held(memory, monkeypatch)
    holdings.notified("r", "2")
    holdings.notified("r", "2")
    clock[0] = 9_000_000_000
    holdings.settle(doubles.results(sent={"r"}))
    holdings.notified("r", "1")

    assert memory.names[1:] == ["transfer.notified", "transfer.notified", "notification.orphaned"]


def test_a_heartbeat_extends_the_leases_that_it_names(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, clock = held(memory, monkeypatch)
    holdings.extend("s,r")
    clock[0] = 2_500_000_000
    holdings.settle(doubles.results(sent={"r"}))

    assert memory.names == ["prefill.lease_started", "prefill.lease_extended"]


# Device ------------------------------------------------------------------------------------------


class Device:
    """A device whose events pass at times that the test sets; its clock runs 7 s behind the host's."""

    def __init__(self) -> None:
        self.host_ns = 1_000_000_000
        self.work_ends_ns = 0
        self.waited = False
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object = None) -> None:
                self.at_ns = device.host_ns + 20_000 if stream else max(device.work_ends_ns, device.host_ns)

            def query(self) -> bool:
                return device.now() >= self.at_ns

            def synchronize(self) -> None:
                device.waited = True

            def elapsed_time(self, other: Any) -> float:
                return (other.at_ns - self.at_ns) / 1e6

        self.Event = Event
        self.Stream = object

    def now(self) -> int:
        self.host_ns += 1_000
        return self.host_ns


def test_a_forward_on_a_device_is_stamped_when_it_ended_not_when_it_was_launched() -> None:
    device = Device()
    clock = DeviceClock(device, device.now)
    device.work_ends_ns = device.host_ns + 30_000_000
    clock.mark(1)
    assert list(clock.passed()) == []

    device.host_ns += 40_000_000
    [(step, passed_ns)] = clock.passed()
    assert step == 1
    assert abs(passed_ns - device.work_ends_ns) < 20_000
    assert not device.waited


def test_a_mark_is_never_placed_before_it_was_made_or_after_it_was_seen() -> None:
    device = Device()
    clock = DeviceClock(device, device.now)
    clock.mark(1)
    recorded_ns = device.host_ns
    [(_, passed_ns)] = clock.passed()

    assert recorded_ns - 1_000 <= passed_ns <= device.host_ns


def test_a_worker_on_a_device_emits_the_forward_later(memory: doubles.Memory, connector: doubles.Connector) -> None:
    device = Device()
    worker(memory, connector, device_clock=DeviceClock(device, device.now))
    device.work_ends_ns = device.host_ns + 5_000_000
    stepped(connector, 7, SECOND_RUNNER)
    assert memory.names == ["step.started", "step.connected"]

    device.host_ns += 10_000_000
    stepped(connector, 8, SECOND_RUNNER)
    forwarded = memory.of("step.forwarded")[0]
    assert forwarded.numbers == (7, 1, 1, 0)
    assert abs(forwarded.t_ns - device.work_ends_ns) < 20_000
