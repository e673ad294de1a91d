"""vLLM's NIXL connectors under vLLM's own names, watched while tracing is on.

Load them with `"kv_connector_module_path": "instrumented_connectors.nixl"`. The names matter: vLLM
compares the configured name with its own ones to decide about cache layouts and block sizes.
"""

from __future__ import annotations

from typing import ClassVar

from instrumented_connectors import versions

versions.require()

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as stock  # noqa: E402 - refused before loaded

from instrumented_connectors.traced import Traced  # noqa: E402
from kvtrace.modes import PULL, PUSH  # noqa: E402


class NixlPullConnector(Traced, stock.NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull connector: D reads the KV from P."""

    kvtrace_mode: ClassVar[str] = PULL


class NixlPushConnector(Traced, stock.NixlPushConnector):  # type: ignore[misc]
    """vLLM's push connector: P writes the KV to D."""

    kvtrace_mode: ClassVar[str] = PUSH


NixlConnector = NixlPullConnector
