"""Puts known delays into the lab's processes: on their PYTHONPATH, so that Python runs it before anything else.

Each `Point` names a function of vLLM, NIXL, the router or the standard library. Its wrapper looks for a file of the
point's name in `KVTRACE_FAULTS`: none, and nothing happens; a number, and the call sleeps that many ms; the word
`stop`, and the process stops itself (SIGSTOP) until the test continues it. A file `.NAME.fired` gets a line for
each time, with how long it really was in ms: on busy cores a sleeper wakes late.
Beside them, while a file `corrupts` is there, D's worker changes one byte of the first block of each request whose KV
has arrived, before anybody is told of it.
Nothing of kvtrace knows of this.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import os
import runpy
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

FOLDER_VARIABLE = "KVTRACE_FAULTS"
_WRITER = "nixl-push-writer"
_REGISTRATION = b"PUSH_REG:"
_HEARTBEAT = b"HB:"
_SERVING = "vllm.entrypoints.openai.completion.serving"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_DETOKENISER = "vllm.v1.engine.output_processor"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

# `nixl` is a front for the package of one CUDA release; its `_api` is that package's, under another name.
_NIXL_API = "nixl_cu12._api"

_writers: dict[int, Any] = {}


@dataclass(frozen=True)
class Point:
    """Where a delay can be put: around which function, on which side of it, for which of its calls."""

    name: str
    module: str
    function: str
    after: bool = False
    applies: Callable[[Sequence[Any], Any], bool] = lambda _args, _result: True
    """Whether this call counts, from its arguments and (for points behind it) its result."""


def _has_outputs(args: Sequence[Any], result: Any) -> bool:
    """Return whether the front end gets outputs to detokenise, and not only figures."""
    return bool(args[1])


def _carries_outputs(args: Sequence[Any], result: Any) -> bool:
    """Return whether a message holds outputs, and not only figures, which go out with every step."""
    return bool(getattr(args[1], "outputs", None))


def _has_tokens(args: Sequence[Any], result: Any) -> bool:
    """Return whether a step computes."""
    return bool(args[1].total_num_scheduled_tokens)


def _registers(args: Sequence[Any], result: Any) -> bool:
    """Return whether a notification that is to be sent is a registration."""
    return any(isinstance(argument, bytes) and argument.startswith(_REGISTRATION) for argument in args)


def _completes(args: Sequence[Any], result: Any) -> bool:
    """Return whether notifications that were read say that a transfer is complete."""
    messages = [message for one in result.values() for message in one]
    return any(not message.startswith((_REGISTRATION, _HEARTBEAT)) for message in messages)


def _says_done(args: Sequence[Any], result: Any) -> bool:
    """Return whether a poll says that the transfer is done."""
    return bool(result == "DONE")


def _says_done_on_1(args: Sequence[Any], result: Any) -> bool:
    """Return whether a poll on the second of an engine's ranks says that the transfer is done."""
    ranks = sys.modules.get("vllm.distributed.parallel_state")
    return bool(result == "DONE") and ranks is not None and ranks.get_tensor_model_parallel_rank() == 1


def _wants_sample(args: Sequence[Any], result: Any) -> bool:
    """Return whether workers have computed a step and wait to be told to sample."""
    return result is None


def _wakes_for_blocks(args: Sequence[Any], result: Any) -> bool:
    """Return whether P's sender thread wakes with blocks to send."""
    if threading.current_thread().name != _WRITER:
        return False
    worker = _writers.get(id(args[0]))
    return worker is not None and worker._finished_blocks_inbox.qsize() > 0


def _replies(what: str) -> Callable[[Sequence[Any], Any], bool]:
    """Return a test for a worker's reply that holds sampled tokens, or a finished load."""

    def applies(args: Sequence[Any], result: Any) -> bool:
        output = args[1]
        if what == "tokens":
            tokens = getattr(output, "sampled_token_ids", None)
            return tokens is not None and len(tokens) > 0
        report = getattr(output, "kv_connector_output", None)
        return bool(report is not None and report.finished_recving)

    return applies


POINTS = (
    Point("router.before_prefill_leg", "kvtrace.router.dispatch", "Dispatcher._prefill"),
    Point("router.before_decode_leg", "kvtrace.router.dispatch", "Dispatcher._decode"),
    Point("router.reads_reply", "kvtrace.router.upstream", "Reply.body"),
    Point("http.parses", "uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol.on_headers_complete"),
    Point("frontend.renders", _SERVING, "OpenAIServingCompletion.render_completion_request"),
    Point("frontend.serialises", _SERVING, "OpenAIServingCompletion.request_output_to_completion_response"),
    Point("frontend.detokenises", _DETOKENISER, "OutputProcessor.process_outputs", applies=_has_outputs),
    Point("frontend.hands_over", "vllm.v1.engine.core_client", "AsyncMPClient.add_request_async"),
    Point("core.takes_in", "vllm.v1.engine.core", "EngineCore.preprocess_add_request"),
    Point("core.sends_output", "vllm.v1.serial_utils", "MsgpackEncoder.encode_into", applies=_carries_outputs),
    Point("core.allocates", "vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots"),
    Point("core.orders_sample", _EXECUTOR, "FutureWrapper.result", after=True, applies=_wants_sample),
    Point("forward", "vllm.model_executor.models.qwen3", "Qwen3ForCausalLM.forward"),
    Point("worker.executes", "vllm.v1.worker.gpu_worker", "Worker.execute_model", applies=_has_tokens),
    Point("worker.replies_tokens", _EXECUTOR, "WorkerProc.enqueue_output", applies=_replies("tokens")),
    Point("worker.replies_load", _EXECUTOR, "WorkerProc.enqueue_output", applies=_replies("load")),
    Point("nixl.prepares", _NIXL_API, "nixl_agent.make_prepped_xfer"),
    Point("nixl.posts", _NIXL_API, "nixl_agent.transfer"),
    Point("nixl.sees_done", _NIXL_API, "nixl_agent.check_xfer_state", after=True, applies=_says_done),
    Point("nixl.sees_done_on_rank_1", _NIXL_API, "nixl_agent.check_xfer_state", after=True, applies=_says_done_on_1),
    Point("nixl.reads_completion", _NIXL_API, "nixl_agent.get_new_notifs", after=True, applies=_completes),
    Point("nixl.sends_registration", _NIXL_API, "nixl_agent.send_notif", applies=_registers),
    Point("push.sends_registration", f"{_NIXL}.push_worker", "NixlPushConnectorWorker._do_send_reg_notif"),
    Point("push.writer_wakes", "threading", "Event.wait", after=True, applies=_wakes_for_blocks),
)  # fmt: skip


def _wanted(name: str) -> str:
    """Return what the point is to do now, "" for nothing."""
    try:
        return Path(os.environ[FOLDER_VARIABLE], name).read_text()
    except OSError:
        return ""


def _note(name: str, began_s: float) -> None:
    """Say how long the point has held its caller up."""
    with Path(os.environ[FOLDER_VARIABLE], f".{name}.fired").open("a") as mark:
        mark.write(f"{(time.monotonic() - began_s) * 1000}\n")


def _hold(name: str) -> None:
    """Do what the point is to do, in a thread."""
    wanted, began_s = _wanted(name), time.monotonic()
    if wanted == "stop":
        Path(os.environ[FOLDER_VARIABLE], name).unlink(missing_ok=True)  # once
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # of this thread, so that it goes no further
    elif wanted:
        time.sleep(float(wanted) / 1000)
    if wanted:
        _note(name, began_s)


async def _hold_task(name: str) -> None:
    """Do what the point is to do, in a task: others go on, unless the process is to stop."""
    wanted, began_s = _wanted(name), time.monotonic()
    if wanted == "stop":
        _hold(name)
    elif wanted:
        await asyncio.sleep(float(wanted) / 1000)
        _note(name, began_s)


def _wrapped(call: Callable[..., Any], point: Point) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def delayed_later(*args: Any, **kwargs: Any) -> Any:
            if point.applies((*args, *kwargs.values()), None):
                await _hold_task(point.name)
            return await call(*args, **kwargs)

        return delayed_later

    @functools.wraps(call)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        if not point.after and point.applies((*args, *kwargs.values()), None):
            _hold(point.name)
        result = call(*args, **kwargs)
        if point.after and point.applies((*args, *kwargs.values()), result):
            _hold(point.name)
        return result

    return delayed


def _remember_writer(module: ModuleType) -> None:
    """Note whose the sender thread's event is, so that its wakes can be told from others."""
    worker_class = module.NixlPushConnectorWorker
    construct = worker_class.__init__

    @functools.wraps(construct)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _writers[id(self._push_writer_wake)] = self

    worker_class.__init__ = remembering


def _corrupt_arrivals(module: ModuleType) -> None:
    """Let D's worker change a byte of KV that has arrived: of the first layer, in the first block that it was sent."""
    worker_class = module.NixlBaseConnectorWorker
    results = worker_class.get_transfer_results

    @functools.wraps(results)
    def corrupting(self: Any) -> Any:
        awaited = {name: meta.local_physical_block_ids[0][0] for name, meta in self._recving_metadata.items()
                   if any(meta.local_physical_block_ids)}  # fmt: skip
        found = results(self)
        for name in found.finished_recving:
            if _wanted("corrupts") and name in awaited:
                first = self.kv_caches_base_addr[self.engine_id][self.tp_rank][0]
                byte = ctypes.c_ubyte.from_address(first + awaited[name] * self.block_len_per_layer[0])
                byte.value ^= 1
                _note("corrupts", time.monotonic())
        return found

    worker_class.get_transfer_results = corrupting


def _patch(module: ModuleType) -> None:
    for point in POINTS:
        if point.module == module.__name__:
            owner_name, _, name = point.function.rpartition(".")
            owner = getattr(module, owner_name)
            wrapped = _wrapped(getattr(owner, name), point)
            is_static = isinstance(vars(owner).get(name), staticmethod)
            setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
    if module.__name__ == f"{_NIXL}.push_worker":
        _remember_writer(module)
    if module.__name__ == f"{_NIXL}.base_worker":
        _corrupt_arrivals(module)


sites = runpy.run_path(str(Path(__file__).parents[1] / "sites.py"))
if os.environ.get(FOLDER_VARIABLE):
    sites["patch_on_import"](dict.fromkeys([*(point.module for point in POINTS), f"{_NIXL}.base_worker"], _patch))
sites["run_next_of"](__file__)
