"""The observer of copies through a host buffer, over a double of vLLM's worker; tests/engine has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from instrumented_connectors.host_copies import HostCopies
from tests.connector_doubles import Memory

BLOCK_BYTES = 3 * 64 + 64
CACHES = {"first": np.zeros((10, 3, 64), dtype=np.uint8), "second": np.zeros((10, 64), dtype=np.uint8)}


class Worker:
    """What vLLM's worker does with a host buffer: one copy a request, whose order is that of the step's metadata."""

    def __init__(self, *, use_host_buffer: bool = True) -> None:
        self.use_host_buffer = use_host_buffer
        self.copy_blocks: Any = None
        self.copied: list[tuple[str, list[int]]] = []

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.copy_blocks = copy_operation

    def save_kv_to_host(self, metadata: Any) -> None:
        for blocks in metadata.reqs_to_save.values():
            self.copy_blocks(CACHES, CACHES, blocks, blocks, "d2h")

    def sync_recved_kv_to_device(self, req_id: str, meta: Any) -> None:
        self.copy_blocks(CACHES, CACHES, meta, meta, "h2d")

    def copy(self, src: Any, dst: Any, src_ids: list[int], dst_ids: list[int], direction: str) -> None:
        self.copied.append((direction, src_ids))


@pytest.fixture
def memory() -> Memory:
    return Memory()


def watched(memory: Memory) -> Worker:
    worker = Worker()
    HostCopies(memory, 1).attach(worker)
    worker.set_host_xfer_buffer_ops(worker.copy)
    return worker


def saves(worker: Worker, **blocks: list[int]) -> None:
    worker.save_kv_to_host(SimpleNamespace(reqs_to_save=blocks))


def test_each_copy_is_told_by_request_with_its_blocks_and_bytes(memory: Memory) -> None:
    worker = watched(memory)
    saves(worker, a=[1, 2], b=[3])
    worker.sync_recved_kv_to_device("c", [4, 5, 6])

    assert [(one.stage, one.request, one.numbers) for one in memory.events] == [
        ("prefill.copy_started", "a", (1, 2, 0, 0)), ("prefill.copied", "a", (1, 2, 2 * BLOCK_BYTES, 0)),
        ("prefill.copy_started", "b", (1, 1, 0, 0)), ("prefill.copied", "b", (1, 1, BLOCK_BYTES, 0)),
        ("decode.copy_started", "c", (1, 3, 0, 0)), ("decode.copied", "c", (1, 3, 3 * BLOCK_BYTES, 0)),
    ]  # fmt: skip
    assert worker.copied == [("d2h", [1, 2]), ("d2h", [3]), ("h2d", [4, 5, 6])]
    assert memory.facts == {"host_buffer": "1"}


def test_a_request_without_blocks_copies_nothing_and_shifts_nobody(memory: Memory) -> None:
    saves(watched(memory), a=[], b=[3])

    assert [one.request for one in memory.events] == ["b", "b"]


def test_an_operation_that_is_given_again_is_watched_once(memory: Memory) -> None:
    """Also the watched one itself."""
    worker = watched(memory)
    worker.set_host_xfer_buffer_ops(worker.copy)
    worker.set_host_xfer_buffer_ops(worker.copy_blocks)
    saves(worker, a=[1])

    assert memory.names == ["prefill.copy_started", "prefill.copied"]


def test_without_a_host_buffer_nothing_is_watched(memory: Memory) -> None:
    worker = Worker(use_host_buffer=False)
    before = dict(vars(worker))
    HostCopies(memory, 1).attach(worker)
    HostCopies(memory, 1).attach(SimpleNamespace())  # a release that knows none

    assert vars(worker) == before
    assert memory.facts == {}


def test_a_copy_that_fails_has_no_end_and_fails_as_before(memory: Memory) -> None:
    worker = Worker()
    HostCopies(memory, 1).attach(worker)

    def fails(*_args: Any) -> None:
        raise RuntimeError("no device")

    worker.set_host_xfer_buffer_ops(fails)
    with pytest.raises(RuntimeError, match="no device"):
        worker.sync_recved_kv_to_device("c", [4])

    assert (memory.names, memory.enabled) == (["decode.copy_started"], True)


def test_where_vllm_calls_otherwise_tracing_ends_and_the_copy_is_made(memory: Memory) -> None:
    """A release whose operation takes other arguments."""
    worker = watched(memory)
    made: list[tuple[Any, ...]] = []
    worker.set_host_xfer_buffer_ops(lambda *args: made.append(args))
    worker.copy_blocks(CACHES, [1], "d2h")

    assert (len(made), memory.enabled) == (1, False)
