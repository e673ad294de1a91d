"""The observer of vLLM's scheduler: its steps, and how long its thread had no processor around them."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from instrumented_connectors import intake
from tests import connector_doubles as doubles
from tests.observers import from_p, scheduler


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


@pytest.mark.parametrize(
    ("comes_ms", "counted_ms", "told_ms"),
    [(-3, 0, 4), (1, 0, 4), (1, 3, 1), (None, 0, 0)],
    ids=["in the step", "behind it", "late behind it", "nobody"],
)
def test_who_comes_while_an_engine_only_decodes_learns_that_its_scheduler_had_no_processor(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch, comes_ms: int | None,
    counted_ms: int, told_ms: int,
) -> None:  # fmt: skip
    """A step ends at 10 ms, and of the 6 ms until the next one the kernel counts 4 without a processor.

    The thread that fills the core's queue asks for the scheduler's: what was counted by then is not told, as it may
    have been before that step's end. Of one that came before it, the scheduler itself asks at the end.
    """

    class EngineCore:
        def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
            return request, 7

    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=EngineCore))
    clock_ms, count_ms = [1.0], [100]
    for module in ("intake", "scheduler_side"):
        monkeypatch.setattr(f"instrumented_connectors.{module}.now_ns", lambda: int(clock_ms[0] * 1_000_000))
    monkeypatch.setattr("instrumented_connectors.scheduler_side.starved_ns", lambda: count_ms[0] * 1_000_000)
    monkeypatch.setattr(intake.Starvation, "starved_ns", lambda _: count_ms[0] * 1_000_000)
    scheduler(memory, connector)
    others, own = doubles.request("others", prompt=6), doubles.request("own", prompt=6)

    def scheduled(work: dict[str, int]) -> None:
        connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output(work))

    connector.on_new_request(others)
    scheduled({"others": 6})
    connector.get_kv_connector_stats()
    scheduled({"others": 1})
    moments = {10: connector.get_kv_connector_stats}
    if comes_ms is not None:
        moments[10 + comes_ms] = lambda: EngineCore().preprocess_add_request(own)
    for clock_ms[0], happens in sorted(moments.items()):
        count_ms[0] += counted_ms if clock_ms[0] > 10 else 0
        happens()
    clock_ms[0], count_ms[0] = 16, 104
    if comes_ms is not None:
        connector.on_new_request(own)
    scheduled({"others": 1, "own": 6})
    connector.get_kv_connector_stats()

    assert [event.numbers[1] // 1_000_000 for event in memory.of("step.ended")] == [0, 0, told_ms]


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


def test_a_step_says_how_long_ago_its_workers_were_told_to_sample(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told 10 ms before the end; of a step whose workers answer without being told nothing is said."""

    class MultiprocExecutor:
        def sample_tokens(self, grammar: object, non_block: bool = False) -> tuple[object, bool]:
            return grammar, non_block

    module = SimpleNamespace(MultiprocExecutor=MultiprocExecutor)
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.multiproc_executor", module)
    clock = itertools.count(1_000_000_000, 10_000_000)  # 10 ms apart
    monkeypatch.setattr("instrumented_connectors.scheduler_side.now_ns", lambda: next(clock))
    scheduler(memory, connector)
    executor = MultiprocExecutor()
    assert executor.sample_tokens("no step yet", non_block=True) == ("no step yet", True)
    for is_asked in (True, False):
        connector.returns["build_connector_meta"] = doubles.metadata()
        connector.build_connector_meta(doubles.output({"a": 1}))
        if is_asked:
            executor.sample_tokens(None)
        connector.get_kv_connector_stats()

    assert [event.numbers[2] for event in memory.of("step.ended")] == [10_000_000, 0]


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
