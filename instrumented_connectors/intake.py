"""When a request came into the engine core's queue, which the core empties between two steps only.

The scheduler's hooks see a request when it is taken out. How long it had been there is the difference between a slow
front end and a step that had to end first.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from instrumented_connectors import privates
from instrumented_connectors.watch import Tracer, now_ns, watch

_CAME = "kvtrace_came_ns"
_WATCHED = "kvtrace_is_watched"


def attach(tracer: Tracer) -> None:
    """Watch the core of this process, once, on the thread that fills its queue."""
    core = getattr(sys.modules.get(privates.CORE_MODULE), privates.CORE_CLASS, None)
    if core is None or getattr(core, _WATCHED, False):
        return
    watch(core, privates.CORE_INTAKE, tracer, after=_stamp)
    setattr(core, _WATCHED, True)


def _stamp(_token: None, result: Any, *_: Any) -> None:
    request = result[0] if isinstance(result, tuple) and result else result
    with suppress(AttributeError):  # of a release whose requests take none, nothing is known, and all else is traced
        setattr(request, _CAME, now_ns())


def intake_ns(request: Any) -> int:
    """Return for how long, ns, the request has been in the core's queue; 0 where that was not seen."""
    came_ns = getattr(request, _CAME, 0)
    return max(0, now_ns() - came_ns) if came_ns else 0
