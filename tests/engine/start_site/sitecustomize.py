"""Lets an engine under test start sooner: its processes fork, as vLLM's do on GPUs, and collect less garbage meanwhile.

On the PYTHONPATH of a lab's engines, so that Python runs it before anything else. vLLM's CPU platform spawns the
engine core and each worker, which then import all of vLLM anew: two thirds of a lab's start on two cores. What is
forked is vLLM's own code as it is; `tests/engine/test_record_command.py` and `make demo` run engines that spawn.

With SPIN_VARIABLE set, core and worker spin for so many seconds after each message and not for one, so that engines
can run beside other tests; engines whose times are compared spin as vLLM has it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

SPIN_VARIABLE = "KVTRACE_TEST_SPIN_S"


def _fork(module: ModuleType) -> None:
    if not hasattr(module, "get_mp_context"):
        raise ImportError(f"{module.__name__} has no get_mp_context: correct tests/engine/start_site")
    module.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]


def _spin_less(module: ModuleType) -> None:
    if SPIN_VARIABLE in os.environ:
        (spin_s,) = module.SpinCondition.__init__.__defaults__  # seconds, where it is what it was
        module.SpinCondition.__init__.__defaults__ = (min(spin_s, float(os.environ[SPIN_VARIABLE])),)


PATCHES = {
    "vllm.utils.system_utils": _fork,
    "vllm.distributed.device_communicators.shm_broadcast": _spin_less,
}


class _Finder:
    """Finds the modules to be patched, and patches them once they have run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec with a loader that patches, None for other modules."""
        patch = PATCHES.get(name)
        spec = PathFinder.find_spec(name, path, target) if patch is not None else None
        if spec is None or spec.loader is None or patch is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
gc.set_threshold(50_000, 20, 100)  # an engine's start is imports, and a quarter of their time went into collections
