"""A worker's copies between its device and the host buffer that NIXL reads and writes, on the forward thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instrumented_connectors.watch import Tracer, now_ns, watch
from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TO_HOST = (stages.PREFILL_COPY_STARTED.code, stages.PREFILL_COPIED.code)
_TO_DEVICE = (stages.DECODE_COPY_STARTED.code, stages.DECODE_COPIED.code)


class HostCopies:
    """Watches the copies of one worker and emits their begin and end, each by request.

    vLLM copies with an operation of the platform, which it gives to the worker once its caches are there. It is called
    once a request, and is not told for which: P's saves come in the order of the step's metadata, D's one a call.
    """

    def __init__(self, tracer: Tracer, rank: int) -> None:
        self._tracer = tracer
        self._rank = rank
        self._worker: Any = None
        self._watched: Any = None
        self._saving: Iterator[str] = iter(())
        self._loading = ""
        self._block_bytes = 0

    def attach(self, worker: Any) -> None:
        """Watch the worker's copies; where it has no host buffer there are none, and nothing is watched."""
        if not getattr(worker, "use_host_buffer", False):
            return
        self._worker, tracer = worker, self._tracer
        tracer.fact("host_buffer", "1")
        watch(worker, "set_host_xfer_buffer_ops", tracer, after=self._given)
        watch(worker, "save_kv_to_host", tracer, before=self._saves)
        watch(worker, "sync_recved_kv_to_device", tracer, before=self._loads)

    def _given(self, _token: None, _result: None, *_args: Any, **_kwargs: Any) -> None:
        operation = getattr(self._worker, "copy_blocks", None)
        if operation is not None and operation is not self._watched:
            watch(self._worker, "copy_blocks", self._tracer, before=self._begins, after=self._ended)
            self._watched = self._worker.copy_blocks

    def _saves(self, metadata: Any) -> None:
        self._saving = iter(tuple(metadata.reqs_to_save))

    def _loads(self, req_id: str, *_args: Any, **_kwargs: Any) -> None:
        self._loading = req_id

    def _begins(
        self,
        src_kv_caches: Mapping[str, Any],
        dst_kv_caches: Mapping[str, Any],
        src_block_ids: Sequence[int],
        dst_block_ids: Sequence[int],
        direction: str,
    ) -> tuple[tuple[int, int], str, int]:
        now = now_ns()
        del src_kv_caches, dst_kv_caches, dst_block_ids  # named as vLLM names them, so that keywords find their place
        is_save = direction == "d2h"
        request = next(self._saving, "") if is_save else self._loading
        codes, blocks = (_TO_HOST if is_save else _TO_DEVICE), len(src_block_ids)
        if blocks:
            self._tracer.emit(codes[0], request, self._rank, blocks, 0, 0, "", now)
        return codes, request, blocks

    def _ended(
        self, begun: tuple[tuple[int, int], str, int], _result: None, src_kv_caches: Mapping[str, Any], *_args: Any,
        **_kwargs: Any,
    ) -> None:  # fmt: skip
        now = now_ns()
        codes, request, blocks = begun
        if not blocks:
            return
        if not self._block_bytes:  # of one block in all caches: vLLM copies whole rows of each
            caches = src_kv_caches.values()
            self._block_bytes = sum(int(cache.nbytes) // len(cache) for cache in caches if len(cache))
        self._tracer.emit(codes[1], request, self._rank, blocks, blocks * self._block_bytes, 0, "", now)
