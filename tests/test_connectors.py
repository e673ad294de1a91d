"""The observers over doubles of vLLM's parts: each point where it happens, and vLLM none the wiser."""

from __future__ import annotations

import itertools
import pickle
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_connectors import privates
from instrumented_connectors.agent import AgentSide
from instrumented_connectors.descriptors import Lengths
from instrumented_connectors.device_clock import DeviceClock
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.peers import PeerSide
from instrumented_connectors.probe import Probe
from instrumented_connectors.scheduler_side import SchedulerSide
from instrumented_connectors.sender import SenderSide
from instrumented_connectors.step_mark import StepMark
from instrumented_connectors.watch import Bounded, watch
from instrumented_connectors.worker_side import WorkerSide
from tests import connector_doubles as doubles

if TYPE_CHECKING:
    from collections.abc import Callable

TO_P = {"do_remote_decode": True}
REMOTE = "r-on-P"


@pytest.fixture
def memory() -> doubles.Memory:
    return doubles.Memory()


@pytest.fixture
def connector() -> doubles.Connector:
    return doubles.Connector()


def scheduler(memory: doubles.Memory, connector: doubles.Connector, producer: bool = False) -> doubles.Connector:
    SchedulerSide(memory, producer=producer).attach(connector)
    return connector


def worker(
    memory: doubles.Memory, connector: doubles.Connector, pulls: bool = True, device_clock: DeviceClock | None = None
) -> Holdings:
    holdings = Holdings(memory, rank=1, extension_ns=20)
    WorkerSide(memory, holdings, 1, pulls=pulls, device_clock=device_clock).attach(connector)
    return holdings


def agent(
    memory: doubles.Memory, holdings: Holdings | None = None, probe: Probe | None = None
) -> tuple[AgentSide, Any, doubles.Agent]:
    inner = doubles.Agent()
    side = AgentSide(memory, holdings or Holdings(memory, 1, 20), 1, probe)
    return side, side.attach(inner), inner


def from_p() -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_request_id": REMOTE}


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

    assert memory.facts == {"missing.no_such_method": "Agent"}


def test_what_is_remembered_of_requests_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "LIMIT", 3)
    bounded = Bounded()
    for number in range(5):
        bounded[str(number)] = number

    assert list(bounded) == ["2", "3", "4"]


# Scheduler ---------------------------------------------------------------------------------------


def test_a_request_on_p_from_arrival_to_its_kept_blocks(memory: doubles.Memory, connector: doubles.Connector) -> None:
    scheduler(memory, connector)
    request = doubles.request(params=TO_P)
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 16)
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=([1, 2, 3], [4])), 0)
    for tokens, computed in ((512, 0), (88, 512), (1, 600)):
        request.num_computed_tokens = computed
        connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output({"r": tokens}))
    connector.request_finished_all_groups(request, ([1, 2], [3]))

    assert memory.of("prefill.enqueued")[0].numbers == (600, 2_500_000_000, 0, 0)
    assert memory.of("prefill.considered")[0].numbers == (16, 0, 0, 0)
    assert memory.of("prefill.allocated")[0].numbers == (4, 0, 0, 0)
    # The step behind the last of the prompt works on the second output token: it decides nothing about the first.
    assert [event.numbers for event in memory.of("prefill.scheduled")] == [(1, 512, 0, 600), (2, 88, 512, 600)]
    assert memory.of("prefill.finished")[0] == ("prefill.finished", "r", (3, 1, 0, 0), "FINISHED_LENGTH_CAPPED", 0)


def test_a_request_on_d_keeps_its_leg_after_vllm_flips_its_params(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    scheduler(memory, connector, producer=True)
    request = doubles.request(params=from_p())
    connector.on_new_request(request)
    connector.returns["get_num_new_matched_tokens"] = (600, True)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=([1, 2],)), 600)
    request.kv_transfer_params["do_remote_prefill"] = False
    connector.update_connector_output(doubles.results(received={"r"}))
    # It resumes: the scheduler allocates once more, with nothing left to bring.
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=([1, 2],)), 0)
    connector.request_finished(request, [1, 2])

    assert memory.names == [
        "decode.enqueued", "decode.considered", "decode.allocated", "decode.ready", "decode.finished",
    ]  # fmt: skip
    assert memory.of("decode.enqueued")[0][1:4] == ("r", (600, 2_500_000_000, 1, 0), REMOTE)
    assert memory.of("decode.considered")[0].numbers == (0, 600, 0, 0)
    assert memory.of("decode.finished")[0].numbers == (8, 0, 0, 0)


@pytest.mark.parametrize(("producer", "stage"), [(True, "prefill.enqueued"), (False, "decode.enqueued")])
def test_a_request_without_params_has_the_leg_of_its_engines_role(
    memory: doubles.Memory, connector: doubles.Connector, producer: bool, stage: str
) -> None:
    scheduler(memory, connector, producer)
    connector.on_new_request(doubles.request())

    assert memory.names == [stage]


def test_an_aborted_request_is_told_apart(memory: doubles.Memory, connector: doubles.Connector) -> None:
    scheduler(memory, connector)
    request = doubles.request(params=from_p())
    connector.on_new_request(request)
    request.status.name = "FINISHED_ABORTED"
    connector.request_finished(request, [])

    assert memory.of("decode.aborted")[0].ref == "FINISHED_ABORTED"


def test_a_preempted_request_is_allocated_and_scheduled_anew(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    scheduler(memory, connector)
    request = doubles.request(params=from_p())
    blocks = SimpleNamespace(blocks=([1],))
    connector.returns["build_connector_meta"] = doubles.metadata()
    connector.on_new_request(request)
    connector.update_state_after_alloc(request, blocks, 0)
    connector.build_connector_meta(doubles.output({"r": 600}))
    connector.build_connector_meta(doubles.output({}, preempted={"r"}))
    connector.update_state_after_alloc(request, blocks, 0)
    connector.build_connector_meta(doubles.output({"r": 600}))

    assert [name for name in memory.names if not name.startswith("step")] == [
        "decode.enqueued", "decode.allocated", "decode.scheduled",
        "decode.preempted", "decode.allocated", "decode.scheduled",
    ]  # fmt: skip


def test_a_request_that_is_passed_over_again_and_again_is_shown_now_and_then(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(1_000_000_000, 4_000_000)  # 4 ms apart
    monkeypatch.setattr("instrumented_connectors.scheduler_side.now_ns", lambda: next(times))
    scheduler(memory, connector)
    request = doubles.request(params=from_p())
    connector.on_new_request(request)
    for _ in range(7):
        connector.get_num_new_matched_tokens(request, 0)

    assert [event.t_ns for event in memory.of("decode.considered")] == [1_000_000_000, 1_012_000_000, 1_024_000_000]


def test_steps_are_numbered_and_end_in_order_however_many_are_under_way(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    scheduler(memory, connector)
    made = [doubles.metadata(), doubles.metadata()]
    for each in made:
        connector.returns["build_connector_meta"] = each
        connector.build_connector_meta(doubles.output({"a": 1, "b": 2}))
    connector.get_kv_connector_stats()
    connector.get_kv_connector_stats()
    connector.get_kv_connector_stats()

    assert [each.kvtrace_step for each in made] == [(1, 3, True), (2, 3, True)]
    assert [event.numbers for event in memory.of("step.scheduled")] == [(1, 3, 2, 0), (2, 3, 2, 0)]
    assert [event.numbers[0] for event in memory.of("step.ended")] == [1, 2]


def test_a_step_without_tokens_shows_only_if_something_happens_in_it(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    scheduler(memory, connector)

    def step(output: Any = None, **fields: Any) -> list[str]:
        memory.forget()
        connector.returns["build_connector_meta"] = doubles.metadata(**fields)
        connector.build_connector_meta(doubles.output({}))
        if output is not None:
            connector.update_connector_output(output)
        connector.get_kv_connector_stats()
        return memory.names

    assert step() == []
    assert step(doubles.results()) == []
    assert step(push_registrations={"r": {}}) == ["step.scheduled", "step.ended"]
    assert step(doubles.results(sent={"r"})) == ["prefill.released", "step.scheduled", "step.ended"]
    assert memory.of("step.scheduled")[0].t_ns <= time.monotonic_ns()


def test_the_step_says_how_many_requests_wait_for_kv(memory: doubles.Memory, connector: doubles.Connector) -> None:
    scheduler(memory, connector)
    for name in ("r", "s"):
        request = doubles.request(name, from_p())
        connector.on_new_request(request)
        connector.update_state_after_alloc(request, SimpleNamespace(blocks=([1],)), 600)
    connector.update_connector_output(doubles.results(received={"r"}, failed={"s"}))
    connector.returns["build_connector_meta"] = doubles.metadata(reqs_to_recv={"t": doubles.meta()})
    request = doubles.request("t", from_p())
    connector.on_new_request(request)
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=([1],)), 600)
    connector.build_connector_meta(doubles.output({}))

    assert memory.of("step.scheduled")[0].numbers == (1, 0, 0, 1)
    assert [event.request for event in memory.of("decode.ready")] == ["r"]


# Worker ------------------------------------------------------------------------------------------


def stepped(
    connector: doubles.Connector, step: int, order: tuple[str, ...], tokens: int = 5, late: bool = True, **fields: Any
) -> None:
    """Run one step through a worker's connector, its hooks in the given order."""
    bound = doubles.metadata(**fields)
    bound.kvtrace_step = StepMark((step, tokens, late))
    connector.bind_connector_metadata(bound)
    for name in order:
        getattr(connector, name)(*(["context"] if name == "start_load_kv" else []))
    connector.clear_connector_metadata()


def test_a_step_starts_when_the_worker_takes_it_from_its_queue(
    memory: doubles.Memory, connector: doubles.Connector
) -> None:
    """What a worker prepares before the first hook belongs to the step: the pickled mark notes when it was taken."""
    worker(memory, connector)
    bound = doubles.metadata()
    before_ns = time.monotonic_ns()
    bound.kvtrace_step = pickle.loads(pickle.dumps(StepMark((7, 5, True))))  # noqa: S301 - as vLLM's queue does
    after_ns = time.monotonic_ns()
    time.sleep(0.002)
    connector.bind_connector_metadata(bound)

    assert tuple(bound.kvtrace_step) == (7, 5, True)
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


# Agent -------------------------------------------------------------------------------------------


def read(
    proxy: Any,
    rows: tuple[tuple[int, int, int], ...] = ((0, 100, 0), (100, 100, 0), (200, 300, 0)),
    indices: tuple[int, ...] = (0, 2),
    operation: str = "READ",
) -> Any:
    side = proxy.prep_xfer_dlist("NIXL_INIT_AGENT", proxy.get_xfer_descs(np.array(rows), "DRAM"))
    other = proxy.prep_xfer_dlist("remote", proxy.get_xfer_descs(np.array(rows), "DRAM"))
    return proxy.make_prepped_xfer(operation, side, np.array(indices), other, np.array(indices), notif_msg=b"r-on-P:1")


def test_a_read_is_bracketed_by_its_polls_and_its_bytes_need_no_telemetry(memory: doubles.Memory) -> None:
    side, proxy, inner = agent(memory)
    inner.states = ["PROC", "PROC", "DONE", "DONE"]
    side.enter("r", REMOTE)
    handle = read(proxy)
    proxy.transfer(handle)
    before_ns = time.monotonic_ns()
    states = [proxy.check_xfer_state(handle) for _ in range(4)]
    proxy.release_xfer_handle(handle)

    number = memory.events[0].numbers[0]
    assert states == ["PROC", "PROC", "DONE", "DONE"]
    assert memory.names == [
        "transfer.prepared", "transfer.post_started", "transfer.post_ended", "transfer.done",
    ]  # fmt: skip
    assert memory.of("transfer.prepared")[0][1:4] == ("r", (number, 2, 1, 0), REMOTE)
    assert memory.of("transfer.post_ended")[0].numbers == (number, 400, 2, 0)
    done = memory.of("transfer.done")[0]
    assert before_ns <= done.numbers[1] <= done.t_ns
    assert done.numbers[2] == 3
    assert inner.released == [handle]


def test_a_small_transfer_that_comes_back_done_has_no_pending_poll(memory: doubles.Memory) -> None:
    _, proxy, inner = agent(memory)
    inner.post, inner.states = "DONE", ["DONE"]
    handle = read(proxy)
    proxy.transfer(handle)
    proxy.check_xfer_state(handle)

    assert memory.of("transfer.post_ended")[0].numbers[3] == 1
    assert memory.of("transfer.done")[0].numbers[1:] == (0, 1, 0)


@pytest.mark.parametrize(("state", "reason"), [("ERR", "ERR"), (OSError("gone"), "OSError: gone")])
def test_a_transfer_that_fails_says_why_once(memory: doubles.Memory, state: Any, reason: str) -> None:
    _, proxy, inner = agent(memory)
    inner.states = [state, "ERR"]
    handle = read(proxy)
    proxy.transfer(handle)
    if isinstance(state, OSError):
        with pytest.raises(OSError, match="gone"):
            proxy.check_xfer_state(handle)
    else:
        assert proxy.check_xfer_state(handle) == "ERR"
    proxy.check_xfer_state(handle)

    assert [event.ref for event in memory.of("transfer.failed")] == [reason]


def test_a_post_or_a_preparation_that_raises_is_a_failure(memory: doubles.Memory) -> None:
    side, proxy, inner = agent(memory)
    side.enter("r", REMOTE)
    handle = read(proxy)
    inner.post = RuntimeError("no route")
    with pytest.raises(RuntimeError, match="no route"):
        proxy.transfer(handle)
    inner.post = OSError("no memory")
    with pytest.raises(OSError, match="no memory"):
        read(proxy)

    assert [(event.request, event.ref) for event in memory.of("transfer.failed")] == [
        ("r", "RuntimeError: no route"),
        ("r", "OSError: no memory"),
    ]


def test_registrations_are_seen_leaving_and_arriving(memory: doubles.Memory) -> None:
    _, proxy, inner = agent(memory)
    fields = {"request_id": "r-on-D", "decode_engine_id": "D", "local_block_ids": [[1, 2]], "remote_port": 1}
    message = b"PUSH_REG:" + msgspec.msgpack.encode(fields)
    proxy.send_notif("rank-0", notif_msg=message)
    proxy.send_notif("rank-1", notif_msg=message)
    inner.notifications = {"d": [message, b"PUSH_REG:garbage"]}

    assert proxy.get_new_notifs() == {"d": [message, b"PUSH_REG:garbage"]}
    assert [event.numbers for event in memory.of("decode.registration_sent")] == [
        (1, len(message), 0, 0),
        (1, len(message), 1, 0),
    ]
    assert memory.of("registration.received")[0][1:4] == ("r-on-D", (1, 0, 0, 0), "D")
    assert memory.enabled


def test_a_completion_notification_is_the_readers_own_request_or_an_orphan(memory: doubles.Memory) -> None:
    holdings = Holdings(memory, 1, 20)
    holdings.take(doubles.metadata(reqs_to_recv={"a:b": doubles.meta()}))
    _, proxy, inner = agent(memory, holdings)
    inner.notifications = {"p": [b"a:b:1", b"unknown:1", b"\xff\xfe"]}
    proxy.get_new_notifs()

    assert [(event.stage, event.request) for event in memory.events[:2]] == [
        ("transfer.notified", "a:b"),
        ("notification.orphaned", "unknown"),
    ]
    assert memory.enabled


def test_the_stand_in_is_the_agent_in_everything_else(memory: doubles.Memory) -> None:
    _, proxy, inner = agent(memory)

    assert proxy.name == "agent"
    with pytest.raises(RuntimeError, match="telemetry is off"):
        proxy.get_xfer_telemetry("handle")
    with pytest.raises(AttributeError):
        _ = proxy.no_such_method
    assert inner.released == []


lengths = st.lists(st.integers(1, 4).map(lambda n: n * 100), min_size=1, max_size=30)


@given(lengths, st.data())
def test_bytes_are_those_of_the_chosen_descriptors_in_every_form(sizes: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    rows = [(1_000 * number, size, 0) for number, size in enumerate(sizes)]
    runs = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    strided = np.array([(0, size, 0, size, count) for size, count in runs])
    expected = sum(sizes[index] for index in chosen)

    for descs in (rows, np.array(rows), strided):
        found = Lengths.of(descs)
        assert found is not None
        assert found.total(chosen) == expected
        assert found.total(np.array(chosen, dtype=np.int64)) == expected


def test_descriptors_of_an_unknown_form_have_no_length() -> None:
    assert [Lengths.of(descs) for descs in (None, [], object(), np.zeros((0, 3)), [(1, 2)])] == [None] * 5


# Sender ------------------------------------------------------------------------------------------


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_wake_that_finds_work_is_shown_and_idle_ones_are_not(memory: doubles.Memory) -> None:
    side, _, _ = agent(memory)
    pushing = doubles.PushWorker()
    SenderSide(memory, side, 1).attach(pushing)
    pushing.registrations["r"] = {"request_id": "r-on-D"}
    pushing.start()
    try:
        eventually(lambda: pushing.rounds == 1)
        for expected in (2, 3):
            pushing._push_writer_wake.set()
            eventually(lambda expected=expected: pushing.rounds == expected)
        assert memory.names == []
        pushing._finished_blocks_inbox.put(("r", ([1],)))
        pushing._push_writer_wake.set()
        eventually(lambda: "sender.slept" in memory.names)
    finally:
        pushing.stop()

    assert memory.names[:4] == ["sender.woke", "sender.picked", "transfer.matched", "sender.slept"]
    woke, picked, matched, _ = memory.events[:4]
    assert woke.numbers[1] == 1
    assert 0 < woke.numbers[2] < 5_000_000_000
    assert (picked.request, matched.request, matched.ref) == ("r", "r", "r-on-D")
    assert pushing.started == [("r", "r-on-D")]


def test_a_push_that_waits_for_a_handshake_is_matched_once(memory: doubles.Memory) -> None:
    side, proxy, _ = agent(memory)
    pushing = doubles.PushWorker()
    SenderSide(memory, side, 1).attach(pushing)
    inner = pushing.started

    pushing._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    pushing._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    read(proxy, operation="WRITE")

    assert memory.names == ["transfer.matched", "transfer.prepared"]
    assert len(inner) == 2


def test_a_release_without_a_private_member_loses_its_points_only(memory: doubles.Memory) -> None:
    side, _, _ = agent(memory)
    pushing = doubles.PushWorker()
    del pushing._push_writer_stop, pushing._deferred_push_inbox
    pushing._push_finished_blocks = None
    SenderSide(memory, side, 1).attach(pushing)

    pushing._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    assert memory.names == ["transfer.matched"]
    assert privates.missing(pushing, "push") == [
        "_nixl_handshake", "_push_writer_stop", "_deferred_push_inbox", "_push_finished_blocks",
    ]  # fmt: skip


def test_handshakes_have_an_end_either_way(memory: doubles.Memory) -> None:
    class Worker:
        def _nixl_handshake(self, host: str, port: int, remote_tp_size: int, expected_engine_id: str) -> str:
            if port == 0:
                raise ConnectionError(host)
            return "agents"

    peer = Worker()
    PeerSide(memory, 1).attach(peer)
    assert peer._nixl_handshake("h", 1, 1, "P") == "agents"
    with pytest.raises(ConnectionError):
        peer._nixl_handshake("h", 0, remote_tp_size=1, expected_engine_id="P")

    assert [(event.stage, event.numbers[:2], event.ref) for event in memory.events] == [
        ("handshake.started", (1, 0), "P"),
        ("handshake.ended", (1, 1), "P"),
        ("handshake.started", (1, 0), "P"),
        ("handshake.ended", (1, 0), "P"),
    ]


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


# Probe -------------------------------------------------------------------------------------------


def test_the_probe_sees_a_transfer_done_and_never_touches_a_released_one(memory: doubles.Memory) -> None:
    probe = Probe(memory, rate=1.0)
    _, proxy, inner = agent(memory, probe=probe)
    released = []
    inner.check_xfer_state = lambda handle: pytest.fail("polled after release") if handle in released else "PROC"
    inner.release_xfer_handle = released.append
    probe._check = inner.check_xfer_state
    handles = [read(proxy) for _ in range(20)]
    for handle in handles:
        proxy.transfer(handle)
    time.sleep(0.01)
    for handle in handles[1:]:
        proxy.release_xfer_handle(handle)
    probe._check = lambda _handle: "DONE"
    eventually(lambda: memory.of("transfer.probed"))
    probe.stop()

    [probed] = memory.of("transfer.probed")
    assert probed.numbers[0] == memory.of("transfer.prepared")[0].numbers[0]
    assert 0 < probed.numbers[1] <= probed.t_ns
    assert memory.enabled


def test_the_probe_is_off_unless_asked_for(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTRACE_PROBE", raising=False)
    assert Probe.from_environment(memory) is None
    for value, wanted in (("0", False), ("often", False), ("0.5", True)):
        monkeypatch.setenv("KVTRACE_PROBE", value)
        assert (Probe.from_environment(memory) is not None) is wanted


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
