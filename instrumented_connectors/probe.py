"""An opt-in thread that polls sampled transfers often, so that the end of the wire is known closely.

It changes what it measures: a poll also drives NIXL's own progress, and every call on a transfer
waits for the probe's current poll. So it is off unless KVTRACE_PROBE gives a rate.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

from instrumented_connectors.descriptors import handle_key
from instrumented_connectors.watch import Forwarder, Tracer, now_ns
from kvtrace import stages

if TYPE_CHECKING:
    from instrumented_connectors.agent import Transfer

_PROBED = stages.PROBED.code
_EVERY_S = 0.0001
_IDLE_S = 0.1
_GUARDED = ("transfer", "check_xfer_state", "release_xfer_handle", "get_xfer_telemetry")


class Probe:
    """Polls the transfers that it was told to follow until they are done or released.

    One lock keeps its polls apart from every call of vLLM's on a transfer, so a handle is never polled
    while it is being released, nor after. It never releases one itself.
    """

    def __init__(self, tracer: Tracer, rate: float) -> None:
        self._tracer = tracer
        self._rate = rate
        self._lock = threading.Lock()
        self._followed: dict[int, tuple[Any, Transfer, int]] = {}
        self._wake = threading.Event()
        self._stopped = False
        self._check: Any = None
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environment(cls, tracer: Tracer) -> Probe | None:
        """Return the probe that KVTRACE_PROBE asks for, None where it asks for none."""
        try:
            rate = float(os.environ.get("KVTRACE_PROBE", "0"))
        except ValueError:
            rate = 0.0
        return cls(tracer, rate) if rate > 0 else None

    def guard(self, proxy: Forwarder) -> None:
        """Put the lock around the agent's calls on transfers."""
        self._check = proxy.check_xfer_state
        for name in _GUARDED:
            setattr(proxy, name, self._guarded(getattr(proxy, name), releases=name == "release_xfer_handle"))

    def _guarded(self, call: Any, *, releases: bool) -> Any:
        def guarded(handle: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if releases:
                    self._followed.pop(handle_key(handle), None)
                return call(handle, *args, **kwargs)

        return guarded

    def follow(self, handle: Any, transfer: Transfer) -> None:
        """Poll this transfer from now on, if it is among the sampled ones."""
        if random.random() >= self._rate:  # noqa: S311 - sampling
            return
        with self._lock:
            self._followed[handle_key(handle)] = (handle, transfer, 0)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, daemon=True, name="kvtrace-probe")
                self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """End the thread; nothing is polled any more when this returns."""
        with self._lock:
            self._stopped = True
            self._followed.clear()
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopped and self._tracer.enabled:
                if not self._followed:
                    self._wake.wait(_IDLE_S)
                    self._wake.clear()
                    continue
                for key in list(self._followed):
                    self._poll(key)
                time.sleep(_EVERY_S)
        except Exception as error:  # noqa: BLE001 - serving comes first
            self._tracer.disable("probe", error)

    def _poll(self, key: int) -> None:
        with self._lock:
            followed = self._followed.get(key)
            if followed is None:
                return
            handle, transfer, last_pending_ns = followed
            began_ns = now_ns()
            try:
                status = self._check(handle)
            except Exception:  # noqa: BLE001 - vLLM's own poll will see it and deal with it
                del self._followed[key]
                return
            if status == "PROC":
                self._followed[key] = (handle, transfer, began_ns)
                return
            ended_ns = now_ns()
            del self._followed[key]
        if status == "DONE":
            self._tracer.emit(_PROBED, transfer.request, transfer.number, last_pending_ns, 0, 0, "", ended_ns)
