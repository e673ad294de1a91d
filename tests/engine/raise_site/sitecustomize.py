"""Makes one hook of the instrumented connectors raise at a time, and lets tracing begin anew before the next one.

On the PYTHONPATH of the lab's processes, so that Python runs it before anything else. `KVTRACE_RAISE` names a folder:
`armed` in it holds "GENERATION NAME"; the hook of that name raises whenever it is called, and a new generation gives
each process a new emitter, as a restart would. While the name is `each`, every hook raises when it is first called in
a process. A file in `hooks/` tells of every hook that is watched, one in `raised/` of every process in which it raised.
Nothing of kvtrace knows of this.
"""

from __future__ import annotations

import functools
import os
import runpy
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

FOLDER_VARIABLE = "KVTRACE_RAISE"
OBSERVERS = ("before", "after", "failed")
EXCHANGE_HOOKS = ("received", "sending", "sent", "left")
EACH = "each"

_raised: set[str] = set()


class HookError(Exception):
    """What an armed hook raises."""


def _armed() -> tuple[str, str]:
    """Return the generation and the name of the hook that raises in it."""
    try:
        generation, _, name = Path(os.environ[FOLDER_VARIABLE], "armed").read_text().partition(" ")
    except OSError:
        return "", ""
    return generation, name


def _tell(folder: str, name: str) -> None:
    Path(os.environ[FOLDER_VARIABLE], folder, name).touch()


def _raising(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the hook so that it raises while it is armed."""
    _tell("hooks", name)

    @functools.wraps(hook)
    def raising(*args: Any, **kwargs: Any) -> Any:
        armed = _armed()[1]
        if armed == name or (armed == EACH and name not in _raised):
            _raised.add(name)
            _tell("raised", f"{name} {os.getpid()}")
            raise HookError(name)
        return hook(*args, **kwargs)

    return raising


class Rearmed:
    """The process's emitter, replaced by a new one with every generation."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._generation = _armed()[0]
        self._emitter = make()
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Return whether tracing is on, after beginning anew where a new generation asks for it."""
        with self._lock:
            generation, name = _armed()
            if generation != self._generation or (name == EACH and not self._emitter.enabled):
                self._generation = generation
                self._emitter.close()
                self._emitter = self._make()
            return bool(self._emitter.enabled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._emitter, name)


def _patch_emit(module: ModuleType) -> None:
    made: list[Rearmed] = []

    def tracer() -> Rearmed:
        if not made:
            made.append(Rearmed(module._from_environment))
        return made[0]

    module.tracer = tracer  # type: ignore[attr-defined]


def _patch_watch(module: ModuleType) -> None:
    watch = module.watch

    @functools.wraps(watch)
    def watch_raising(target: Any, name: str, tracer: Any, **observers: Any) -> None:
        where = f"{type(target).__name__}.{name}"
        for kind in OBSERVERS:
            if observers.get(kind) is not None:
                observers[kind] = _raising(observers[kind], f"{where}.{kind}")
        watch(target, name, tracer, **observers)

    module.watch = watch_raising  # type: ignore[attr-defined]


def _patch_middleware(module: ModuleType) -> None:
    """Let the guarded methods of an exchange raise inside their guard, and the beginning of one inside its own."""
    for name in EXCHANGE_HOOKS:
        guarded = getattr(module._Exchange, name)
        cell = guarded.__closure__[guarded.__code__.co_freevars.index("method")]
        cell.cell_contents = _raising(cell.cell_contents, f"_Exchange.{name}")
    module._describe = _raising(module._describe, "TraceMiddleware._describe")  # type: ignore[attr-defined]
    module._Exchange = _raising(module._Exchange, "TraceMiddleware._begin")  # type: ignore[attr-defined]


def _patch_traced(module: ModuleType) -> None:
    # With nothing attached no other hook could raise, so this one has to be asked for.
    if _armed()[1] == "attach":
        module.attach = _raising(module.attach, "attach")  # type: ignore[attr-defined]


def _patch_probe(module: ModuleType) -> None:
    module.Probe._poll = _raising(module.Probe._poll, "Probe._poll")  # type: ignore[attr-defined]


PATCHES = {
    "kvtrace.emit": _patch_emit,
    "instrumented_connectors.watch": _patch_watch,
    "instrumented_connectors.middleware": _patch_middleware,
    "instrumented_connectors.traced": _patch_traced,
    "instrumented_connectors.probe": _patch_probe,
}


sites = runpy.run_path(str(Path(__file__).parents[1] / "sites.py"))
if os.environ.get(FOLDER_VARIABLE):
    sites["patch_on_import"](PATCHES)
sites["run_next_of"](__file__)
