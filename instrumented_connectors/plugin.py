"""vLLM's plug-in entry point: makes vLLM's own connector names load the instrumented classes.

vLLM calls `register` in every process of an engine, at most once per import of its plug-in module, before it
creates a connector. Without `KVTRACE_SPOOL` it does nothing and imports nothing. Children of a
MultiConnector are created by the same registry, under the same names, so they are covered too; a
connector given with `kv_connector_module_path` never asks the registry and stays what it is.

`KVConnectorFactory._registry` is private: `register_connector` refuses a name that is taken, and these names
are taken. Only the values of three names are replaced, each by a loader that falls back to vLLM's own.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_MODULE = "instrumented_connectors.nixl"
_SPOOL_VARIABLE = "KVTRACE_SPOOL"  # `kvtrace.emit` has it too; without it, nothing of kvtrace is imported
_log = logging.getLogger("vllm.kvtrace")


def register() -> None:
    """Put the instrumented classes behind vLLM's names where tracing is switched on; never raise."""
    if not os.environ.get(_SPOOL_VARIABLE):
        return
    try:
        _register()
    except Exception as error:  # noqa: BLE001  vLLM would not start for what is wrong here
        _log.warning("kvtrace: connectors are not instrumented: %s: %s", type(error).__name__, error)


def _register() -> None:
    from instrumented_connectors import versions

    if refusal := versions.problem(versions.installed()):
        _log.warning("kvtrace: connectors are not instrumented: %s", refusal)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry: dict[str, Callable[[], Any]] = KVConnectorFactory._registry  # noqa: SLF001  see above
    for name in NAMES:
        stock = registry.get(name)
        if stock is None:
            _log.warning("kvtrace: this vLLM has no connector named %s", name)
        elif getattr(stock, "func", None) is not _load:
            registry[name] = functools.partial(_load, name, stock)


def _load(name: str, stock: Callable[[], Any]) -> Any:
    """Return the instrumented class of that name, vLLM's own where it cannot be had."""
    try:
        return getattr(importlib.import_module(_MODULE), name)
    except Exception as error:  # noqa: BLE001  serving comes first
        _log.warning("kvtrace: %s is not instrumented: %s: %s", name, type(error).__name__, error)
        return stock()
