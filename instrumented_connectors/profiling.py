"""Names for what a connector's threads do, as labels of their samples; loaded only where profiles are wanted.

A stage in a stage takes its place and gives it back: a sample is counted once, under the innermost.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from instrumented_connectors import privates
from instrumented_connectors.scheduler_side import STEP_ATTRIBUTE
from kvtrace import profiler

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumented_connectors.watch import Tracer

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_SCHEDULER = {
    "get_num_new_matched_tokens": "match",
    "update_state_after_alloc": "allocate",
    "build_connector_meta": "plan",
    "update_connector_output": "take_in",
    "request_finished": "finish",
    "request_finished_all_groups": "finish",
}
_FORWARD_THREAD = {"start_load_kv": "start_load", "wait_for_save": "save", "get_transfer_results": "get_finished"}
_AGENT = {
    "make_prepped_xfer": "prepare",
    "transfer": "post",
    "check_xfer_state": "poll",
    "send_notif": "notify",
    "get_new_notifs": "read_notifications",
}
_BEHIND_FORWARD = ("finish_forward", "wait_for_save", "get_transfer_results", "clear_connector_metadata")
_log = logging.getLogger("kvtrace")


def attach(connector: Any, vllm_config: Any, tracer: Tracer) -> None:
    """Profile this process, and label what the connector does in it. Never raises."""
    try:
        found = profiler.start(_labels(connector, vllm_config), tracer)
        if found is None:
            return
        if connector.connector_scheduler is not None:
            for name, stage in _SCHEDULER.items():
                label(connector, name, stage, found, "scheduler")
        if connector.connector_worker is not None:
            _attach_worker(connector, connector.connector_worker, found)
    except Exception as error:  # noqa: BLE001 - serving comes first
        _log.warning("kvtrace: profiles lack stages, serving goes on: %s: %s", type(error).__name__, error)


def server_labels(role: str | None, engine: str | None, connector: str | None) -> dict[str, str]:
    """Return the labels of an API server's process."""
    return {
        "role": _ROLES.get(role or "", ""), "process": "api", "engine": engine or "", "connector": connector or ""
    }  # fmt: skip


def label(target: Any, name: str, stage: str, found: profiler.Profiler, thread: str = "") -> None:
    """Label every call of `target.name` with a stage; a method that a release lacks is left out."""
    call: Callable[..., Any] | None = getattr(target, name, None)
    if call is None:
        return

    @functools.wraps(call)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        before = found.enter(stage, thread)
        try:
            return call(*args, **kwargs)
        finally:
            found.leave(before)

    setattr(target, name, labelled)


def _labels(connector: Any, vllm_config: Any) -> dict[str, str]:
    worker = connector.connector_worker
    # vLLM's "uni" executor runs its only worker in the engine core's process.
    alone = getattr(vllm_config.parallel_config, "distributed_executor_backend", None) == "uni"
    return {
        "role": _ROLES.get(connector.kv_transfer_config.kv_role, ""),
        "process": "core" if worker is None or alone else "worker",
        "engine": str(connector.engine_id),
        "rank": "" if worker is None else str(worker.tp_rank),
        "connector": type(connector).__name__,
    }


def _attach_worker(connector: Any, worker: Any, found: profiler.Profiler) -> None:
    for name, stage in _AGENT.items():
        label(worker.nixl_wrapper, name, stage, found)
    label(worker, privates.NIXL_HANDSHAKE.name, "handshake", found)
    label(worker, privates.START_PUSH.name, "push", found)
    for private in (privates.WRITER_WAKE, privates.WRITER_STOP):
        label(privates.find(worker, private), "wait", "sleep", found)
    for name, stage in _FORWARD_THREAD.items():
        label(connector, name, stage, found, profiler.FORWARD)
    _label_forward(connector, found)


def _label_forward(connector: Any, found: profiler.Profiler) -> None:
    """Label the forward thread from the step's beginning to the first hook behind the forward.

    `start_load_kv` comes behind it too, unless the step has loads that must come first.
    """
    loads_late = True

    def began(metadata: Any) -> None:
        nonlocal loads_late
        mark = getattr(metadata, STEP_ATTRIBUTE, None)
        loads_late = mark is None or mark.loads_late
        if mark is not None and mark.tokens:
            found.forward_began()

    def loading(_metadata: Any) -> None:
        if loads_late:
            found.forward_ended()

    around(connector, "bind_connector_metadata", began)
    around(connector, "start_load_kv", loading)
    for name in _BEHIND_FORWARD:
        around(connector, name, lambda _argument: found.forward_ended())


def around(target: Any, name: str, then: Callable[[Any], None]) -> None:
    """Do something before every call of `target.name`, with its first argument (None where there is none)."""
    call: Callable[..., Any] | None = getattr(target, name, None)
    if call is None:
        return

    @functools.wraps(call)
    def accompanied(*args: Any, **kwargs: Any) -> Any:
        then(args[0] if args else next(iter(kwargs.values()), None))
        return call(*args, **kwargs)

    setattr(target, name, accompanied)
