"""Checksums of handed-over blocks: on P once they are computed, on D once they have arrived (opt-in, sampled).

A thread of its own reads them. P's blocks stand still until P lets them go, D's until the request is over, but for the
last ones, into which D's first step writes: these are copied when D's worker reports the KV. A block that was read
while its owner changed is not counted. Both sides name a block by its number on the side that does not drive the
transfer, which the driving side knows from the transfer itself.
"""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from instrumented_connectors import privates
from instrumented_connectors.block_memory import BlockMemory, Region, regions
from instrumented_connectors.block_news import NEWS_ATTRIBUTE
from instrumented_connectors.descriptors import handle_key
from instrumented_connectors.watch import Bounded, Tracer, watch
from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from instrumented_connectors.agent import AgentSide
    from instrumented_connectors.sampling import Sampling

_PREFILL_CHECKED = stages.PREFILL_CHECKED.code
_DECODE_CHECKED = stages.DECODE_CHECKED.code
_UNCHECKED = stages.UNCHECKED.code

_WAITING_MOST = 256  # requests that may wait for the thread: the copies of D's last blocks take memory
_COPIED_BLOCKS = 2  # D's first step writes into the last block, or, where it recomputes several tokens, the last two

_LET_GO = "the blocks were let go before they were read"
_NO_TRANSFER = "no transfer of these blocks was seen"
_BUSY = "too many requests to check at once"
_LAYOUT = "the blocks' layout is not understood"


class _Hold:
    """The blocks of one request on this worker, while they are its own."""

    __slots__ = ("blocks", "copies", "indices", "obstacle", "over", "sums")

    def __init__(self, blocks: list[int], obstacle: str) -> None:
        self.blocks = blocks
        self.obstacle = obstacle
        self.over = False
        self.indices: tuple[Any, Any] | None = None
        self.sums: dict[int, int] = {}
        self.copies: dict[int, Callable[[], int]] = {}


class BlockChecks:
    """Watches a worker's connector and its agent, and emits checksums of the chosen requests' blocks."""

    def __init__(self, tracer: Tracer, sampling: Sampling, rank: int, *, pulls: bool) -> None:
        self._tracer = tracer
        self._sampling = sampling
        self._rank = rank
        self._pulls = pulls
        self._worker: Any = None
        self._agent: Any = None
        self._metadata: Any = None
        self._holds: Bounded = Bounded()
        self._made: tuple[int, Any] = (0, None)
        self._own_list = 0
        self._regions: list[Region] | None = None
        self._memory: BlockMemory | None = None
        self._reading = threading.Lock()
        self._starting = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def attach(self, connector: Any, worker: Any, agent: AgentSide) -> None:
        """Watch the connector's worker hooks and the agent that stands in for the worker's own."""
        tracer = self._tracer
        self._worker, self._agent = worker, agent
        proxy = worker.nixl_wrapper
        watch(proxy, "get_xfer_descs", tracer, after=self._descriptors_made)
        watch(proxy, "prep_xfer_dlist", tracer, after=self._list_prepared)
        watch(proxy, "make_prepped_xfer", tracer, after=self._prepared)
        watch(connector, "register_kv_caches", tracer, after=self._registered)
        watch(connector, "bind_connector_metadata", tracer, before=self._bound)
        watch(connector, "start_load_kv", tracer, before=self._loading)
        watch(connector, "get_transfer_results", tracer, after=self._settled)
        watch(connector, "shutdown", tracer, before=self.stop)
        if hasattr(connector, "unregister_kv_caches"):
            watch(connector, "unregister_kv_caches", tracer, before=self._forget)

    def stop(self) -> None:
        """End the thread; no block is read any more when this returns."""
        self._forget()
        self._jobs.put(None)

    # Memory --------------------------------------------------------------------------------------

    def _descriptors_made(self, _token: None, result: Any, descs: Any, *_args: Any, **_kwargs: Any) -> None:
        self._made = (id(result), descs)

    def _list_prepared(
        self, _token: None, handle: Any, agent_name: str, xfer_list: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        """Learn from the first list of this side's own descriptors where its blocks lie."""
        made, self._made = self._made, (0, None)
        if agent_name in ("NIXL_INIT_AGENT", "") and self._regions is None:
            rows = made[1] if made[0] == id(xfer_list) else xfer_list
            self._regions = regions(rows, int(getattr(self._worker, "num_blocks", 0)))
            self._own_list = handle_key(handle)

    def _registered(self, _token: None, _result: Any, kv_caches: Mapping[str, Any]) -> None:
        buffers = getattr(self._worker, "host_xfer_buffers", None) or {}
        tensors = [one for cache in (*kv_caches.values(), *buffers.values()) for one in _tensors(cache)]
        if self._regions is not None:
            self._memory = BlockMemory.of(self._regions, tensors, int(self._worker.num_blocks))

    def _forget(self) -> None:
        with self._reading:
            self._memory = self._regions = None

    def _obstacle(self, groups: Iterable[Any]) -> str:
        """Return why blocks cannot be compared with the other side's, "" where they can."""
        worker = self._worker
        if len(list(groups)) != 1 or privates.find(worker, privates.HAS_MAMBA):
            return "the model has several kinds of KV cache"
        if any(int(getattr(worker, name, 1) or 1) > 1 for name in ("dcp_size", "pcp_size", "pp_size")):
            return "context or pipeline parallel ranks hold parts of the blocks"
        if any(getattr(worker, name, False) for name in _REWRITES):
            return "D rearranges blocks that arrive"
        return "" if self._memory is not None else _LAYOUT

    def _physical(self, blocks: Iterable[int]) -> list[int]:
        """Return the numbers that NIXL's descriptors know the scheduler's blocks by."""
        ratio = int(privates.find(self._worker, privates.PHYSICAL_BLOCKS) or 1)
        return [int(block) * ratio + part for block in blocks for part in range(ratio)]

    # Steps ---------------------------------------------------------------------------------------

    def _bound(self, connector_metadata: Any) -> None:
        self._metadata = connector_metadata
        news = getattr(connector_metadata, NEWS_ATTRIBUTE, None)
        if news is None:
            return
        for request_id in news.over:
            self._end(request_id)
        for request_id, groups in news.kept.items():
            hold = self._hold(request_id, groups)
            self._later(request_id, hold, self._read_kept)

    def _loading(self, *_args: Any, **_kwargs: Any) -> None:
        for request_id, meta in self._metadata.reqs_to_recv.items():
            shared = meta.remote.request_id if self._pulls else request_id
            if any(meta.local_block_ids) and self._sampling.takes(shared):
                self._hold(request_id, meta.local_block_ids)

    def _settled(self, _token: None, results: Any, *_args: Any, **_kwargs: Any) -> None:
        for request_id in results.finished_sending:
            self._end(request_id)
        for request_id in results.finished_recving:
            hold = self._holds.get(request_id)
            if hold is None:
                continue
            if request_id in results.failed_recving:
                self._end(request_id)
                continue
            memory = self._memory
            if memory is not None and not hold.obstacle and self._jobs.qsize() < _WAITING_MOST:
                ratio = int(privates.find(self._worker, privates.PHYSICAL_BLOCKS) or 1)
                hold.copies = {block: memory.copied(block) for block in hold.blocks[-_COPIED_BLOCKS * ratio :]}
            self._later(request_id, hold, self._read_arrived)

    def _hold(self, request_id: str, groups: Any) -> _Hold:
        self._end(request_id)
        hold = _Hold(self._physical(block for group in groups for block in group), self._obstacle(groups))
        self._holds[request_id] = hold
        return hold

    def _end(self, request_id: str) -> None:
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            hold.over = True

    def _prepared(
        self,
        _token: None,
        _handle: Any,
        _operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        _remote_side: Any,
        remote_indices: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        request_id, remote_request = self._agent.current
        hold = self._holds.get(request_id)
        if hold is None:
            return
        if handle_key(local_xfer_side) != self._own_list:
            hold.obstacle = hold.obstacle or _LAYOUT
        hold.indices = (local_indices, remote_indices)
        if not self._pulls:
            self._later(request_id, hold, partial(self._tell_written, remote_request=remote_request))

    # The thread ----------------------------------------------------------------------------------

    def _later(self, request_id: str, hold: _Hold, work: Callable[[str, _Hold], None]) -> None:
        if self._jobs.qsize() >= _WAITING_MOST:
            self._unchecked(request_id, len(hold.blocks), _BUSY)
            return
        with self._starting:  # the engine's step and P's sender thread both come here
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="kvtrace-checks")
                self._thread.start()
        self._jobs.put(lambda: work(request_id, hold))

    def _run(self) -> None:
        try:
            while self._tracer.enabled and (job := self._jobs.get()) is not None:
                job()
        except Exception as error:  # noqa: BLE001 - serving comes first
            self._tracer.disable("checks", error)

    def _read(self, hold: _Hold, block: int) -> int | None:
        """Return a block's checksum, None where it was no longer the request's when it had been read."""
        with self._reading:
            if hold.over or self._memory is None:
                return None
            checksum = self._memory.checksum(block)
        return None if hold.over else checksum

    def _read_kept(self, request_id: str, hold: _Hold) -> None:
        if hold.obstacle:
            return  # the transfer's driver, or D, says so
        for block in hold.blocks:
            checksum = self._read(hold, block)
            if checksum is None:
                break
            hold.sums[block] = checksum
            if self._pulls:
                self._tell(_PREFILL_CHECKED, request_id, block, checksum)
        if self._pulls and len(hold.sums) < len(hold.blocks):
            self._unchecked(request_id, len(hold.blocks) - len(hold.sums), _LET_GO)

    def _names(self, hold: _Hold) -> dict[int, int]:
        """Return by own block its number on the other side, as the transfer paired them; {} where it cannot be told."""
        found = self._regions
        if hold.indices is None or found is None:
            return {}
        names = _pairs(*hold.indices, len(found), self._worker.num_blocks)
        if names is None:
            hold.obstacle = hold.obstacle or _LAYOUT
        return names or {}

    def _tell_written(self, request_id: str, hold: _Hold, remote_request: str) -> None:
        names = self._names(hold)
        told = 0
        for own, block in names.items():
            if own in hold.sums and not hold.obstacle:
                self._tell(_PREFILL_CHECKED, request_id, block, hold.sums[own], remote_request)
                told += 1
        expected = len(names) or len(hold.blocks)
        if told < expected:
            self._unchecked(request_id, expected - told, hold.obstacle or _LET_GO)

    def _read_arrived(self, request_id: str, hold: _Hold) -> None:
        names = self._names(hold) if self._pulls else {block: block for block in hold.blocks}
        told = 0
        for block in hold.blocks if not hold.obstacle else ():
            copied = hold.copies.pop(block, None)
            checksum = copied() if copied is not None else self._read(hold, block)
            if checksum is not None and block in names:
                self._tell(_DECODE_CHECKED, request_id, names[block], checksum)
                told += 1
        if told < len(hold.blocks):
            unseen = _NO_TRANSFER if any(block not in names for block in hold.blocks) else _LET_GO
            self._unchecked(request_id, len(hold.blocks) - told, hold.obstacle or unseen)

    def _tell(self, code: int, request_id: str, block: int, checksum: int, ref: str = "") -> None:
        memory = self._memory
        covered = memory.block_bytes if memory is not None else 0
        self._tracer.emit(code, request_id, self._rank, block, checksum, covered, ref)

    def _unchecked(self, request_id: str, blocks: int, reason: str) -> None:
        self._tracer.emit(_UNCHECKED, request_id, self._rank, blocks, 0, 0, reason)


_REWRITES = ("enable_permute_local_kv", "enable_heterogeneous_attn_post_process")


def _tensors(cache: Any) -> list[Any]:
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def _pairs(local: Any, remote: Any, regions_count: int, num_blocks: int) -> dict[int, int] | None:
    """Return by own block the other side's, from a transfer's descriptors; None for an order that is not understood.

    Descriptors are arrays; they come region by region, each naming the same blocks in the same order.
    """
    is_table = regions_count > 0 and len(local) == len(remote) and len(local) % regions_count == 0
    if not is_table or not hasattr(local, "reshape") or not hasattr(remote, "reshape"):
        return None
    own, other = local.reshape(regions_count, -1), remote.reshape(regions_count, -1)
    own_steps, other_steps = own - own[0], other - other[0]
    starts = [region * num_blocks for region in range(regions_count)]
    if own_steps[:, 0].tolist() != starts or any((steps != steps[:, :1]).any() for steps in (own_steps, other_steps)):
        return None
    return dict(zip(own[0].tolist(), other[0].tolist(), strict=True))
