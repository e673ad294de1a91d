"""Lets an engine under test start sooner: its processes fork, as vLLM's do on GPUs, and collect less garbage meanwhile.

On the PYTHONPATH of a lab's engines, so that Python runs it before anything else. vLLM's CPU platform spawns the
engine core and each worker, which then import all of vLLM anew: two thirds of a lab's start on two cores. What is
forked is vLLM's own code as it is; `tests/engine/test_record_command.py` and `make demo` run engines that spawn.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

MODULE, FUNCTION = "vllm.utils.system_utils", "get_mp_context"


class _Finder:
    """Finds the module that says how vLLM starts its processes, and lets it say that they fork."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec with a loader that patches, None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            if not hasattr(module, FUNCTION):
                raise ImportError(f"{MODULE} has no {FUNCTION}: correct tests/engine/start_site")
            setattr(module, FUNCTION, lambda: multiprocessing.get_context("fork"))

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
gc.set_threshold(50_000, 20, 100)  # an engine's start is imports, and a quarter of their time went into collections
