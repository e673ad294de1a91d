"""Times tracing's own work inside a lab's processes, for `tests/bench_observers.py`: on their PYTHONPATH.

Own work is what a watched call takes longer than the method that it watches, what the middleware does with a message,
and events emitted elsewhere. Each process adds up calls and time by kind, in `PID.times` (two numbers a kind, in the
order of the names in `PID.names`) in the folder named by KVTRACE_BENCH_OBSERVERS.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FOLDER = os.environ.get("KVTRACE_BENCH_OBSERVERS")
KINDS = 256
ENTRY = struct.Struct("=qq")
_now = time.perf_counter_ns

Call = Callable[..., Any]


class Times:
    """The sums of one process; what a fork copied is begun anew in the child."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """Open the process's own sums."""
        self.inside = threading.local()
        self.sums: dict[str, list[int]] = {}
        self.lock = threading.Lock()
        self.path = os.path.join(self.folder, str(os.getpid()))
        with open(self.path + ".times", "w+b") as file:
            file.truncate(KINDS * ENTRY.size)
            self.map = mmap.mmap(file.fileno(), 0)

    def add(self, kind: str, spent_ns: int) -> None:
        """Add one call of a kind."""
        sums = self.sums.get(kind)
        if sums is None:
            sums = self._new(kind)
        sums[1] += 1
        sums[2] += spent_ns
        ENTRY.pack_into(self.map, sums[0], sums[1], sums[2])

    def _new(self, kind: str) -> list[int]:
        with self.lock:
            if kind not in self.sums:
                self.sums[kind] = [len(self.sums) * ENTRY.size, 0, 0]
                with open(self.path + ".names", "a", encoding="utf-8") as file:
                    file.write(kind + "\n")
            return self.sums[kind]

    def outermost(self, kind: str, call: Call) -> Call:
        """Return the call timed, unless it is made inside another that is."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.inside, "depth", 0):
                return call(*args, **kwargs)
            self.inside.depth = 1
            begin_ns = _now()
            try:
                return call(*args, **kwargs)
            finally:
                self.add(kind, _now() - begin_ns)
                self.inside.depth = 0

        return timed

    def watched(self, watch: Call) -> Call:
        """Return `watch` so that what it adds to a call is timed: all of the call less the method's own time."""

        def timed_watch(target: Any, name: str, *args: Any, **kwargs: Any) -> None:
            method = getattr(target, name, None)
            if method is None:
                watch(target, name, *args, **kwargs)
                return
            kind = f"{getattr(target, '__name__', type(target).__name__)}.{name}"

            @functools.wraps(method)
            def inner(*a: Any, **k: Any) -> Any:
                depth, self.inside.depth = getattr(self.inside, "depth", 0), 0
                begin_ns = _now()
                try:
                    return method(*a, **k)
                finally:
                    self.inside.method_ns = _now() - begin_ns
                    self.inside.depth = depth

            setattr(target, name, inner)
            watch(target, name, *args, **kwargs)
            call = getattr(target, name)

            @functools.wraps(call)
            def outer(*a: Any, **k: Any) -> Any:
                depth = getattr(self.inside, "depth", 0)
                self.inside.depth, self.inside.method_ns = 1, 0
                begin_ns = _now()
                try:
                    return call(*a, **k)
                finally:
                    spent_ns = _now() - begin_ns
                    self.inside.depth = depth
                    if not depth:
                        self.add(kind, spent_ns - self.inside.method_ns)

            setattr(target, name, outer)

        return timed_watch


def _attach() -> None:
    import instrumented_connectors.watch
    from kvtrace import emit

    times = Times(str(FOLDER))
    os.register_at_fork(after_in_child=times.begin)
    instrumented_connectors.watch.watch = times.watched(instrumented_connectors.watch.watch)
    emit.Emitter.emit = times.outermost("emit", emit.Emitter.emit)
    with suppress(ImportError):
        from instrumented_connectors import middleware

        for name in ("received", "sending", "sent", "left"):
            setattr(
                middleware._Exchange, name, times.outermost(f"middleware.{name}", getattr(middleware._Exchange, name))
            )


if FOLDER:
    _attach()
