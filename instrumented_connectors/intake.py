"""When a request came into the engine core's queue, which the core empties between two steps only.

The scheduler's hooks see a request when it is taken out. How long it had been there is the difference between a slow
front end and a step that had to end first.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from instrumented_connectors import privates
from instrumented_connectors.starvation import Starvation
from instrumented_connectors.watch import Tracer, now_ns, watch

_CAME = "kvtrace_came"
_WATCHED = "kvtrace_is_watched"


class Came(NamedTuple):
    """When a request came into the queue (CLOCK_MONOTONIC), 0 where that was not seen.

    `starved_ns` is for how long the thread that empties the queue had been without a processor until then, but for a
    wait that had not ended; 0 where nobody says.
    """

    t_ns: int = 0
    starved_ns: int = 0

    def waited_ns(self) -> int:
        """Return for how long, ns, the request has been in the queue; 0 where its coming was not seen."""
        return max(0, now_ns() - self.t_ns) if self.t_ns else 0


class _Emptier:
    """The thread that empties the queue, as the one that fills it sees it."""

    def __init__(self) -> None:
        self.watch()

    def watch(self) -> None:
        """Take the thread that calls for the one that empties the queue."""
        self.newest_ns = 0
        self.thread = threading.get_ident()
        self.kernel = Starvation(f"/proc/self/task/{threading.get_native_id()}/schedstat")


_emptier = _Emptier()


def attach(tracer: Tracer) -> None:
    """Watch the core of this process, once, on the thread that fills its queue."""
    _emptier.watch()  # the core's thread makes its scheduler
    core = getattr(sys.modules.get(privates.CORE_MODULE), privates.CORE_CLASS, None)
    if core is None or getattr(core, _WATCHED, False):
        return
    watch(core, privates.CORE_INTAKE, tracer, after=_stamp)
    setattr(core, _WATCHED, True)


def _stamp(_token: None, result: Any, *_: Any) -> None:
    request = result[0] if isinstance(result, tuple) and result else result
    came = Came(now_ns(), _emptier.kernel.starved_ns())
    with suppress(AttributeError):  # of a release whose requests take none, nothing is known, and all else is traced
        setattr(request, _CAME, came)
        _emptier.newest_ns = came.t_ns


def coming(request: Any) -> Came:
    """Return when the request came into the core's queue."""
    found: Came = getattr(request, _CAME, Came())
    if found.starved_ns and threading.get_ident() != _emptier.thread:
        return Came(found.t_ns)  # counted for a thread that is not the one which asks
    return found


def newest_ns() -> int:
    """Return when the newest request came into the core's queue (CLOCK_MONOTONIC), 0 where none was seen."""
    return _emptier.newest_ns
