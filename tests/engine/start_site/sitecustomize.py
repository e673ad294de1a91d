"""Lets an engine under test start sooner: its processes fork, as vLLM's do on GPUs, and collect less garbage meanwhile.

On the PYTHONPATH of a lab's engines, so that Python runs it before anything else. vLLM's CPU platform spawns the
engine core and each worker, which then import all of vLLM anew: two thirds of a lab's start on two cores. What is
forked is vLLM's own code as it is; `tests/engine/test_record_command.py` and `make demo` run engines that spawn.
"""

from __future__ import annotations

import gc
import multiprocessing
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

MODULE, FUNCTION = "vllm.utils.system_utils", "get_mp_context"


def _patch(module: ModuleType) -> None:
    if not hasattr(module, FUNCTION):
        raise ImportError(f"{MODULE} has no {FUNCTION}: correct tests/engine/start_site")
    setattr(module, FUNCTION, lambda: multiprocessing.get_context("fork"))


runpy.run_path(str(Path(__file__).parents[1] / "sites.py"))["patch_on_import"]({MODULE: _patch})
gc.set_threshold(50_000, 20, 100)  # an engine's start is imports, and a quarter of their time went into collections
