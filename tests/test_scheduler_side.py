"""The observer of vLLM's scheduler: each point of a request and of a step where it happens."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from instrumented_connectors.scheduler_side import SchedulerSide
from tests import connector_doubles as doubles
from tests.observers import REMOTE, from_p, scheduler

TO_P = {"do_remote_decode": True}


@pytest.fixture
def memory() -> doubles.Memory:
    return doubles.Memory()


@pytest.fixture
def connector() -> doubles.Connector:
    return doubles.Connector()


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


@pytest.mark.parametrize(
    ("params", "said"),
    [({"transfer_id": "t-1"}, "t-1"), ({"transfer_id": None}, ""), ({}, ""), (None, "")],
    ids=["given", "none given", "a release without it", "no parameters"],
)
def test_a_legs_transfer_id_goes_with_its_blocks(
    memory: doubles.Memory, connector: doubles.Connector, params: dict[str, str | None] | None, said: str
) -> None:
    scheduler(memory, connector, producer=False)
    request = doubles.request(params=params)
    connector.on_new_request(request)
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=([1, 2],)), 0)

    assert memory.of("decode.allocated") == [("decode.allocated", "r", (2, 0, 0, 0), said, 0)]


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

    assert [each.kvtrace_step for each in made] == [(1, 3, True, False), (2, 3, True, False)]
    assert [event.numbers for event in memory.of("step.scheduled")] == [(1, 3, 2, 0), (2, 3, 2, 0)]
    assert [event.numbers[0] for event in memory.of("step.ended")] == [1, 2]


def test_a_step_says_how_long_its_scheduler_had_no_processor_before_it(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of 4 ms, 3 ms of it; no more than the pause; and nothing where another step is still under way."""
    times = itertools.count(1_000_000_000, 4_000_000)  # 4 ms apart
    monkeypatch.setattr("instrumented_connectors.scheduler_side.now_ns", lambda: next(times))
    count_ms = [0]
    monkeypatch.setattr("instrumented_connectors.scheduler_side.starved_ns", lambda: count_ms[0] * 1_000_000)
    scheduler(memory, connector)

    def step(starved_ms: int, *, ends: bool = True) -> None:
        count_ms[0] = starved_ms
        connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output({"a": 1}))
        if ends:
            connector.get_kv_connector_stats()

    step(10)  # nothing is known of the time before the first
    step(13)
    step(50)
    step(53, ends=False)
    step(60)
    connector.get_kv_connector_stats()

    assert [event.numbers[:2] for event in memory.of("step.ended")] == [
        (1, 0), (2, 3_000_000), (3, 4_000_000), (4, 3_000_000), (5, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("paused_ms", "count_ms", "told_ms"), [(4, 3, 3), (4, 9, 4), (0.5, 3, 0)], ids=["some", "all", "a short pause"]
)
def test_the_kernel_is_asked_where_it_matters_only(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch, paused_ms: float,
    count_ms: float, told_ms: float,
) -> None:  # fmt: skip
    """At the end of a step that is shown, and at the next one behind a pause; never for an empty step.

    A step that only its result makes worth showing took 2 ms itself, which may be 2 of what was counted since.
    """
    clock_ms, counts, asked = [1_000.0], [0.0], [0]

    def starved_ns() -> int:
        asked[0] += 1
        return int(counts[0] * 1_000_000)

    monkeypatch.setattr("instrumented_connectors.scheduler_side.now_ns", lambda: int(clock_ms[0] * 1_000_000))
    monkeypatch.setattr("instrumented_connectors.scheduler_side.starved_ns", starved_ns)
    scheduler(memory, connector)

    def step(work: dict[str, int], *, takes_in: bool = False) -> int:
        before = asked[0]
        connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output(work))
        clock_ms[0] += 2
        if takes_in:
            connector.update_connector_output(doubles.results(sent={"a"}))
        connector.get_kv_connector_stats()
        clock_ms[0] += paused_ms
        counts[0] += count_ms
        return asked[0] - before

    readings = [step({"a": 1}), step({"a": 1}), step({}, takes_in=True), *(step({}) for _ in range(5)), step({"a": 1})]

    behind_pause = int(paused_ms >= 1)
    assert readings == [1, 1 + behind_pause, 1, 0, 0, 0, 0, 0, 1]
    told_ns = [event.numbers[1] for event in memory.of("step.ended")]
    late_ms = min(max(0, count_ms - 2), paused_ms) if behind_pause else 0
    assert told_ns == [0, told_ms * 1_000_000, late_ms * 1_000_000, 0]


def test_steps_that_only_decode_ask_the_kernel_nothing_while_nobody_waits(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their marks tell the workers so, too. One who waits for a step, or for its KV, and an idle engine make it ask."""
    asked = [0]

    def starved_ns() -> int:
        asked[0] += 1
        return 0

    monkeypatch.setattr("instrumented_connectors.scheduler_side.starved_ns", starved_ns)
    scheduler(memory, connector)

    def step(work: dict[str, int]) -> tuple[bool, int]:
        before = asked[0]
        made = connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output(work))
        connector.get_kv_connector_stats()
        return made.kvtrace_step.is_prompt, asked[0] - before

    first, second, third = doubles.request("a", prompt=6), doubles.request("b"), doubles.request("c", from_p())
    connector.on_new_request(first)
    assert step({"a": 6}) == (True, 1)
    assert [step({"a": 1}) for _ in range(3)] == [(False, 0)] * 3
    connector.on_new_request(second)
    assert step({"a": 1}) == (False, 1)  # the second waits for its end
    connector.request_finished(second, [])
    connector.on_new_request(third)
    connector.update_state_after_alloc(third, SimpleNamespace(blocks=([1, 2],)), 600)
    assert step({"a": 1}) == (False, 1)  # the third for its KV
    connector.request_finished(third, [])
    assert step({"a": 1}) == (False, 0)
    connector.request_finished(first, [])
    assert step({"a": 1}) == (False, 1)  # nobody is left, and who comes next will wait for this thread


def test_a_step_says_how_long_its_result_waited_for_the_thread_that_is_the_workers_too(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker was through at a count of 5 ms, the scheduler took the result in at 9; another thread says nothing."""
    clock, counts = itertools.count(1_000_000_000, 10_000_000), [0]  # 10 ms apart
    monkeypatch.setattr("instrumented_connectors.scheduler_side.now_ns", lambda: next(clock))
    monkeypatch.setattr("instrumented_connectors.scheduler_side.starved_ns", lambda: counts[0])
    scheduler(memory, connector)
    for elsewhere in (False, True):
        made = connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output({"a": 1}))
        through = partial(made.kvtrace_step.connected, 2, next(clock), 5_000_000)
        beside = threading.Thread(target=through)
        beside.start() if elsewhere else through()
        if elsewhere:
            beside.join()
        counts[0] = 9_000_000
        connector.get_kv_connector_stats()

    assert [event.numbers for event in memory.of("step.result_starved")] == [(1, 2, 4_000_000, 0)]


def test_a_request_says_how_long_it_was_in_the_cores_queue(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the thread that fills the queue stamped it; watched once however many connectors there are, and 0 unseen."""
    passed: list[object] = []

    class EngineCore:
        def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
            passed.append(request)
            return request, 7

    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=EngineCore))
    times = itertools.count(1_000_000_000, 4_000_000)  # 4 ms apart
    monkeypatch.setattr("instrumented_connectors.intake.now_ns", lambda: next(times))
    for _ in range(2):
        SchedulerSide(memory, producer=True).attach(doubles.Connector())
    scheduler(memory, connector)
    queued, unseen = doubles.request("r"), doubles.request("s")

    assert EngineCore().preprocess_add_request(queued) == (queued, 7)
    connector.on_new_request(queued)
    connector.on_new_request(unseen)

    assert passed == [queued]
    assert [(event.request, event.numbers[3]) for event in memory.of("decode.enqueued")] == [("r", 4_000_000), ("s", 0)]


@pytest.mark.parametrize("result", [None, (), ("a text takes no attribute", 1), object()])
def test_a_core_that_returns_something_else_is_traced_all_the_same(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch, result: object
) -> None:
    core = SimpleNamespace(preprocess_add_request=lambda: result)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=core))
    scheduler(memory, connector)

    assert core.preprocess_add_request() is result
    assert memory.enabled


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
