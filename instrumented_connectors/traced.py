"""Turns a vLLM NIXL connector into one that is watched, if tracing is on in this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

import kvtrace
from instrumented_connectors import privates, versions
from instrumented_connectors.agent import AgentSide
from instrumented_connectors.block_checks import BlockChecks
from instrumented_connectors.block_news import BlockNews
from instrumented_connectors.cores import Cores, started
from instrumented_connectors.device_clock import device_clock
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.host_copies import HostCopies
from instrumented_connectors.peers import PeerSide
from instrumented_connectors.probe import Probe
from instrumented_connectors.sampling import Sampling
from instrumented_connectors.scheduler_side import SchedulerSide
from instrumented_connectors.sender import SenderSide
from instrumented_connectors.watch import watch
from instrumented_connectors.worker_side import WorkerSide
from kvtrace import emit
from kvtrace.modes import PULL, PUSH

if TYPE_CHECKING:
    from instrumented_connectors.watch import Tracer

_kinds: set[str] = set()
_workers: list[str] = []  # the classes of this process's watched connectors; MultiConnector has several
_serving: weakref.WeakSet[Any] = weakref.WeakSet()  # those that were not shut down; the others are of an engine before
_of_agents: set[int] = set()  # the threads that came while a worker's connector, and with it NIXL's agent, was made
_PROFILE_VARIABLE = "KVTRACE_PROFILE"  # `kvtrace.profiler` has it too; without it, nothing about profiles is imported
_log = logging.getLogger("kvtrace")
_vllm_log = logging.getLogger("vllm.kvtrace")  # shown like vLLM's own lines, where `kvtrace` shows warnings alone


class Traced:
    """Mixin before a vLLM NIXL connector: the connector as it is, and watched while tracing is on."""

    kvtrace_mode: ClassVar[str]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        before = started() if emit.SPOOL_VARIABLE in os.environ else None
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        came = started() - before if before is not None else ()  # ahead of the tracer, which starts one too
        tracer = emit.tracer()
        if not tracer.enabled:
            return
        if getattr(self, "connector_worker", None) is not None:
            _of_agents.update(came)
        try:
            attach(self, vllm_config, kv_cache_config, tracer, self.kvtrace_mode)
        except Exception as error:  # noqa: BLE001 - serving comes first
            tracer.disable("attach", error)
        if tracer.enabled:
            _say(self)
        if os.environ.get(_PROFILE_VARIABLE):
            _profile(self, vllm_config, tracer)


def _say(connector: Any) -> None:
    """Say in vLLM's log that this connector is traced, and where to."""
    side = "worker" if connector.connector_scheduler is None else "scheduler"
    with contextlib.suppress(Exception):  # whatever handlers and filters there are: serving comes first
        _vllm_log.info(
            "kvtrace: %s (%s) is traced; events go to %s",
            type(connector).__name__, side, os.environ.get(emit.SPOOL_VARIABLE, ""),
        )  # fmt: skip


def _profile(connector: Any, vllm_config: Any, tracer: Tracer) -> None:
    try:
        from instrumented_connectors import profiling

        profiling.attach(connector, vllm_config, tracer)
    except Exception as error:  # noqa: BLE001 - serving comes first
        _log.warning("kvtrace: no profiles of this process, serving goes on: %s: %s", type(error).__name__, error)


def attach(connector: Any, vllm_config: Any, kv_cache_config: Any, tracer: Tracer, mode: str) -> None:
    """Watch a connector that has just been constructed, in the role that it has."""
    config = connector.kv_transfer_config
    sampling = Sampling.from_environment()
    if connector.connector_scheduler is not None:
        _state("core", connector, vllm_config, tracer, mode)
        for name, value in _limits(vllm_config, kv_cache_config).items():
            tracer.fact(name, str(value))
        SchedulerSide(tracer, producer=config.kv_role == "kv_producer").attach(connector)
        if sampling.rate:
            BlockNews(tracer, sampling).attach(connector)
    if connector.connector_worker is not None:
        _state("worker", connector, vllm_config, tracer, mode)
        _attach_worker(connector, tracer, mode, sampling)


def _attach_worker(connector: Any, tracer: Tracer, mode: str, sampling: Sampling) -> None:
    worker = connector.connector_worker
    rank = int(worker.tp_rank)
    lease_s = connector.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30)
    if not _serving:
        _workers.clear()
    _serving.add(connector)
    watch(connector, "shutdown", tracer, before=functools.partial(_serving.discard, connector))
    _workers.append(type(connector).__name__)
    if len(_workers) > 1:
        tracer.fact("connectors", ",".join(_workers))
    holdings = Holdings(tracer, rank, extension_ns=int(lease_s * 2 // 3 * 1e9), connector=len(_workers) - 1)
    probe = Probe.from_environment(tracer)
    agent = AgentSide(tracer, holdings, rank, probe)
    clock = device_clock(worker.device_type)
    for name, value in (("rank", rank), ("device", worker.device_type), ("pp_rank", _pipeline_rank())):
        tracer.fact(name, str(value))
    for name, value in _ways(worker.nixl_wrapper).items():
        tracer.fact(name, value)
    if probe is not None:
        tracer.fact("probe", "1")
        watch(connector, "shutdown", tracer, before=probe.stop)
    if absent := privates.missing(worker, mode):
        tracer.fact("missing", ",".join(absent))
    PeerSide(tracer, rank).attach(worker)
    HostCopies(tracer, rank).attach(worker)
    if mode == PUSH:
        SenderSide(tracer, agent, rank).attach(worker)
    elif privates.find(worker, privates.READ_BLOCKS) is not None:
        watch(
            worker,
            privates.READ_BLOCKS.name,
            tracer,
            before=lambda req_id, meta: agent.enter(req_id, meta.remote.request_id),
            after=lambda *_args, **_kwargs: agent.enter("", ""),
        )
    worker.nixl_wrapper = agent.attach(worker.nixl_wrapper)
    cores = Cores(tracer, of_agents=_of_agents) if len(_workers) == 1 else None
    if cores is not None:
        watch(connector, "shutdown", tracer, before=cores.stop)
    WorkerSide(tracer, holdings, rank, pulls=mode == PULL, device_clock=clock, cores=cores).attach(connector)
    if sampling.rate:
        tracer.fact("verify_kv", str(sampling.rate))
        BlockChecks(tracer, sampling, rank, pulls=mode == PULL).attach(connector, worker, agent)


def _state(kind: str, connector: Any, vllm_config: Any, tracer: Tracer, mode: str) -> None:
    """State this process's facts; a process that is core and worker at once is called core."""
    _kinds.add(kind)
    config = connector.kv_transfer_config
    parallel = vllm_config.parallel_config
    facts = {
        "kind": "core" if "core" in _kinds else kind,
        "kvtrace": kvtrace.__version__,
        "vllm": versions.installed(),
        "nixl": _nixl_version(),
        "engine_id": connector.engine_id,
        "connector": type(connector).__name__,
        "mode": mode,
        "role": config.kv_role,
        "tp_size": parallel.tensor_parallel_size,
        "dp_rank": parallel.data_parallel_rank,
        "model": vllm_config.model_config.model,
    }
    if not versions.supported(facts["vllm"]):
        facts["untested"] = "1"
    for name, value in facts.items():
        tracer.fact(name, str(value))


def _limits(vllm_config: Any, kv_cache_config: Any) -> dict[str, int]:
    """Return what bounds a step and the requests under way, by fact; what a release does not say is left out."""
    scheduler = getattr(vllm_config, "scheduler_config", None)
    # Where vLLM has a limit narrower than the one of its flag, the scheduler goes by that.
    tokens, requests = (
        next((found for name in names if (found := getattr(scheduler, name, None))), None)
        for names in (
            ("max_num_scheduled_tokens", "max_num_batched_tokens"), ("max_num_active_seqs", "max_num_seqs")
        )
    )  # fmt: skip
    known = {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": requests,
        "kv_blocks": getattr(kv_cache_config, "num_blocks", None),
    }
    return {name: value for name, value in known.items() if value}


def _ways(agent: Any) -> dict[str, str]:
    """Return by which backends the agent moves bytes, and what UCX was told of its transports, by fact."""
    known = {
        # The agent has a handle for each backend that it could make; what it was asked for may be more.
        "nixl_backends": ",".join(getattr(agent, "backends", None) or ()),
        "ucx_tls": os.environ.get("UCX_TLS", ""),
        "ucx_net_devices": os.environ.get("UCX_NET_DEVICES", ""),
    }
    return {name: value for name, value in known.items() if value}


def _nixl_version() -> str:
    for package in ("nixl", "nixl-cu12", "nixl-cu13"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _pipeline_rank() -> int:
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)
