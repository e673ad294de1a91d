"""The observer of vLLM's scheduler: each point of a request and of a step where it happens."""

from __future__ import annotations

import itertools
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from instrumented_connectors import intake
from instrumented_connectors.scheduler_side import SchedulerSide
from tests import connector_doubles as doubles
from tests.observers import REMOTE, from_p, scheduler

TO_P = {"do_remote_decode": True}


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
    blocks, remote, looked_ns, _ = memory.of("prefill.allocated")[0].numbers
    assert (blocks, remote) == (4, 0)
    assert 0 < looked_ns == memory.of("prefill.allocated")[0].t_ns - memory.of("prefill.considered")[0].t_ns
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

    (allocated,) = memory.of("decode.allocated")
    assert allocated[:4] == ("decode.allocated", "r", (2, 0, 0, 0), said)


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


def test_what_was_counted_for_another_thread_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scheduler that works on another thread than it was made on."""
    monkeypatch.setattr(intake.Starvation, "starved_ns", lambda _: 5)
    intake._emptier.watch()
    request = doubles.request("r")
    intake._stamp(None, request)
    found = [intake.coming(request)]
    other = threading.Thread(target=lambda: found.append(intake.coming(request)))
    other.start()
    other.join()

    assert [came.starved_ns for came in found] == [5, 0]
    assert found[0].t_ns == found[1].t_ns == intake.newest_ns() > 0


@pytest.mark.parametrize("result", [None, (), ("a text takes no attribute", 1), object()])
def test_a_core_that_returns_something_else_is_traced_all_the_same(
    memory: doubles.Memory, connector: doubles.Connector, monkeypatch: pytest.MonkeyPatch, result: object
) -> None:
    core = SimpleNamespace(preprocess_add_request=lambda: result)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=core))
    scheduler(memory, connector)

    assert core.preprocess_add_request() is result
    assert memory.enabled
