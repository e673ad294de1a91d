"""Folders whose sitecustomize runs in the processes of a lab under test, before anything else there.

A sitecustomize runs this file by its path for what all of them need, since no package is found there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    Patch = Callable[[ModuleType], None]

_HERE = Path(__file__).parent


def paths(*names: str) -> str:
    """Return the PYTHONPATH that holds these sites, each of which runs the next one."""
    folders = [_HERE / name for name in names]
    assert all((folder / "sitecustomize.py").is_file() for folder in folders)
    return os.pathsep.join(map(str, folders))


class _Finder:
    """Finds modules that are to be patched, and patches each once it has run."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec with a loader that patches, None for other modules."""
        patch = self._patches.get(name)
        spec = PathFinder.find_spec(name, path, target) if patch is not None else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def patch_on_import(patches: Mapping[str, Patch]) -> None:
    """Have each of the named modules patched once it has run: at once where it has."""
    for name in patches.keys() & sys.modules.keys():
        patches[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder(patches))


def run_next_of(site: str) -> None:
    """Run the sitecustomize that the one in the file `site` hides."""
    here = Path(site).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
