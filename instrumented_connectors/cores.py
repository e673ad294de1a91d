"""Once a second: on which CPU the forward thread is, and how many other threads of its process want that CPU.

A thread of NIXL or UCX that spins on the forward thread's core takes half of it, and no event says so: steps only
become longer. The kernel says where each thread last ran and whether it runs or could run. While no step is made
nobody is delayed, and looks would say nothing of the steps, so there are none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from instrumented_connectors.watch import Tracer
from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Container

_PLACED = stages.PLACED.code
EVERY_S = 1.0
# Every call to the kernel takes the interpreter's lock from the forward thread, so a look makes few: those that were
# busy when last looked at, some others in turn, and the list of all of them now and then.
BUSY_MOST, IN_TURN, LIST_EVERY = 4, 8, 30
_TASKS = "/proc/self/task"
_READ_BYTES = 1024


class Placed(NamedTuple):
    """One look: the CPU of the forward thread, other threads that run or could run there, and how many were looked at.

    `running` counts the threads that run or could run anywhere, the forward thread not among them; `names` are those
    of the threads beside, each once, joined by commas.
    """

    cpu: int
    beside: int
    running: int
    looked: int
    names: str = ""


def started() -> frozenset[int]:
    """Return the threads that this process has, by the kernel's ids; none where it does not say."""
    try:
        return frozenset(map(int, os.listdir(_TASKS)))
    except OSError:
        return frozenset()


class Cores:
    """Looks at the threads of this process, at the end of each second in which a step was made.

    `of_agents` are the threads that came with NIXL's agents: the one that polls has no name of its own.
    """

    def __init__(self, tracer: Tracer, tasks: str = _TASKS, of_agents: Container[int] = ()) -> None:
        self._tracer = tracer
        self._tasks = tasks
        self._of_agents = of_agents
        self._looks = 0
        self._others: list[int] = []
        self._busy: list[int] = []
        self._has_begun = False
        self._has_stepped = False
        self._stopped = threading.Event()

    def stepped(self) -> None:
        """Take note of a step of the thread that calls; the first is the one whose CPU is looked at from now on."""
        self._has_stepped = True
        if not self._has_begun:
            self._has_begun = True
            forward = threading.get_native_id()
            # Where the process may have no more threads nobody looks, and all else is traced.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._run, args=(forward,), daemon=True, name="kvtrace-cores").start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self, forward: int) -> None:
        while not self._stopped.wait(EVERY_S) and self._tracer.enabled:
            if not self._has_stepped:
                continue
            self._has_stepped = False
            try:
                placed = self.look(forward)
            except (OSError, ValueError, IndexError):
                return  # no such kernel, or the thread is gone: there is nothing more to see
            self._tracer.emit(_PLACED, "", *placed)

    def look(self, forward: int) -> Placed:
        """Return where the forward thread is, and who is beside it; raise OSError where the kernel does not say."""
        _, cpu, _ = self._stat(forward)
        if self._looks % LIST_EVERY == 0:
            own = (forward, threading.get_native_id())
            self._others = [thread for thread in map(int, os.listdir(self._tasks)) if thread not in own]
        self._looks += 1
        turn = [thread for thread in self._others if thread not in self._busy][:IN_TURN]
        found: dict[int, tuple[bool, int, str]] = {}
        ended: list[int] = []
        for thread in (*self._busy, *turn):
            try:
                found[thread] = self._stat(thread)
            except OSError:
                ended.append(thread)
        self._others = [one for one in self._others if one not in turn and one not in ended]
        self._others += [one for one in turn if one in found]
        running = [thread for thread, (runs, _, _) in found.items() if runs]
        self._busy = running[:BUSY_MOST]
        beside = {thread: found[thread][2] for thread in running if found[thread][1] == cpu}
        return Placed(cpu, len(beside), len(running), len(found), self._named(beside))

    def _named(self, beside: dict[int, str]) -> str:
        """Return the names of these threads, each once: of Python's threads the kernel knows only the process's."""
        if not beside:
            return ""
        own = {thread.native_id: thread.name for thread in threading.enumerate()}
        names = {
            own.get(thread) or (f"nixl:{name}" if thread in self._of_agents else name)
            for thread, name in beside.items()
        }
        return ",".join(sorted(name.replace(",", " ") for name in names))

    def _stat(self, thread: int) -> tuple[bool, int, str]:
        """Return whether a thread runs or could run, the CPU on which it last did, and the kernel's name for it."""
        file = os.open(f"{self._tasks}/{thread}/stat", os.O_RDONLY)
        try:
            # The name, in parentheses, may hold anything; state is the third field, the CPU the 39th.
            named, _, rest = os.read(file, _READ_BYTES).rpartition(b")")
        finally:
            os.close(file)
        fields = rest.split()
        return fields[0] == b"R", int(fields[36]), named.partition(b"(")[2].decode("utf-8", "replace")
