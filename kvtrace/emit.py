"""The emit side's only door: `tracer()` is this process's emitter, or one that does nothing where tracing is off.

`Emitter.emit` takes a slot, stamps it and fills it with one `pack_into`; it never raises, and waits only once: the
first event of a forked child opens the child's series. A string's first use, the end of a window and odd values go the
slow way below it. The order of the fields that `_pack` writes is that of `wire.RECORD`: the commit word last.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import sys
import threading
import time
import weakref
from pathlib import Path

from kvtrace import __version__, stages, wire
from kvtrace.series import NO_NUMBERS, Series
from kvtrace.spool import BUDGET_BYTES, intern_short

SPOOL_VARIABLE = "KVTRACE_SPOOL"
BUDGET_VARIABLE = "KVTRACE_SPOOL_BUDGET"

BEGIN_WAIT_S = 0.02  # in a forked child, a second thread waits this long for the first to open the series

_log = logging.getLogger("kvtrace")
_now = time.monotonic_ns
_pack = wire.RECORD.pack_into
_INT_MAX = 2**63 - 1


class NullEmitter:
    """Tracing is off: every method does nothing."""

    __slots__ = ()
    enabled: bool = False

    def emit(
        self, code: int, request: str = "", a: int = 0, b: int = 0, c: int = 0, d: int = 0, ref: str = "", t_ns: int = 0
    ) -> None:
        """Do nothing."""

    def fact(self, name: str, value: str) -> None:
        """Do nothing."""

    def disable(self, where: str, error: BaseException | str) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Emitter(Series, NullEmitter):
    """Writes events to the process's spool. Any thread may call any method at any time."""

    def __init__(self, folder: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        """Open the series in `folder`; raise OSError if not even its first window can be had."""
        super().__init__(folder, budget_bytes)
        self._begin_lock = threading.Lock()
        self._disabling = iter((True,))
        self.begin(reserve=True)
        self.start_thread(self.disable)
        self._begun = True
        _emitters.add(self)

    def emit(
        self, code: int, request: str = "", a: int = 0, b: int = 0, c: int = 0, d: int = 0, ref: str = "", t_ns: int = 0
    ) -> None:
        """Record that a stage was reached, now or at `t_ns` (CLOCK_MONOTONIC). Never raises, never waits."""
        offset = 0
        slots, buffer, ids, _ = self._window
        try:
            request_id = ids[request]
            ref_id = ids[ref]
            for offset in slots:  # one C call: the slot is this thread's alone
                _pack(buffer, offset, t_ns or _now(), a, b, c, d, request_id, ref_id, code, offset)
                return
        except KeyError:  # a string's first use in this file
            try:
                t_ns = t_ns or _now()
                window = self._window
                if intern_short(window, request) and intern_short(window, ref):
                    self.emit(code, request, a, b, c, d, ref, t_ns)
                    return
            except Exception:  # noqa: BLE001, S110 - the slow path is for what the short one cannot do
                pass
        except Exception:  # noqa: BLE001 - a value that does not fit
            if offset:
                _pack(buffer, offset, 0, *NO_NUMBERS, 0, 0, wire.VOID, offset)
        self._emit_slowly(code, request, (a, b, c, d), ref, t_ns)

    def _emit_slowly(
        self, code: object, request: object, numbers: tuple[object, ...], ref: object, t_ns: object
    ) -> None:
        if not self.enabled:
            return
        stage = 0
        try:
            stamp_ns = _whole(t_ns, 0, _INT_MAX) or _now()
            stage = _whole(code, 0, wire.VOID)
            values = tuple(_whole(value, -_INT_MAX - 1, _INT_MAX) for value in numbers)
            if not self._begun:
                self._begin_in_child()
            is_stage = 0 < stage < wire.VOID
            if not is_stage or not self.put(stage, stamp_ns, values, _text(request), _text(ref)):
                self.drop(stage)
        except Exception as error:  # noqa: BLE001 - tracing never raises into its host
            self.drop(stage)
            self.disable("emit", error)

    def _begin_in_child(self) -> None:
        if not self._begin_lock.acquire(timeout=BEGIN_WAIT_S):
            return
        try:
            if not self._begun:
                try:
                    self.begin(reserve=False)
                except OSError as error:
                    self.fail(error)
                self.start_thread(self.disable)
                self._begun = True
        finally:
            self._begin_lock.release()

    def fact(self, name: str, value: str) -> None:
        """Record something that holds for the process; it is repeated in each of its files. Never prompts or tokens."""
        try:
            name, value = _text(name), _text(value)
            if self.enabled and self._facts.get(name) != value:
                self.state_fact(name, value)
        except Exception as error:  # noqa: BLE001 - tracing never raises into its host
            self.disable("fact", error)

    def disable(self, where: str, error: BaseException | str) -> None:
        """Switch tracing off in this process: one record, one log line; later calls do nothing."""
        if not self.enabled or not next(self._disabling, False):
            return
        what = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        with contextlib.suppress(Exception):
            self.put(stages.DISABLED.code, _now(), NO_NUMBERS, "", _text(f"{where}: {what}"))
        self.switch_off()
        _log.warning("kvtrace switched itself off in process %d, serving goes on: %s: %s", os.getpid(), where, what)

    def flush(self) -> None:
        """Do now what the spool thread does within a second."""
        if self.enabled:
            try:
                self.tend(now=True)
            except Exception as error:  # noqa: BLE001 - tracing never raises into its host
                self.disable("flush", error)

    def close(self) -> None:
        """End the series: its files are marked as left, later calls do nothing."""
        thread = self._thread
        if self.enabled:
            self.flush()
            self.switch_off()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def leave_to_parent(self) -> None:
        """In a forked child: forget the parent's files; the first event opens the child's own."""
        super().leave_to_parent()
        self._begin_lock = threading.Lock()
        self._begun = False


def _whole(value: object, least: int, most: int) -> int:
    """Return any number as an integer inside the bounds; 0 for what is no number."""
    try:
        number = int(value) if isinstance(value, float) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 0
    return min(max(number, least), most)


def _text(value: object) -> str:
    """Return any value as the string that stands for it on the wire: "" for None, too long ones cut."""
    text = value if type(value) is str else "" if value is None else str(value)
    return text if len(text) * 4 <= wire.TEXT_BYTES_MAX else wire.encode_text(text).decode()


def _after_fork_in_child() -> None:
    for emitter in list(_emitters):
        emitter.leave_to_parent()


_emitters: weakref.WeakSet[Emitter] = weakref.WeakSet()
_tracer: NullEmitter | None = None
_tracer_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork_in_child)


def tracer() -> NullEmitter:
    """Return the process-wide emitter; one that does nothing when KVTRACE_SPOOL is unset or its folder unusable."""
    global _tracer  # noqa: PLW0603 - one tracer a process
    if _tracer is None:
        with _tracer_lock:
            if _tracer is None:
                _tracer = _from_environment()
    return _tracer


def _from_environment() -> NullEmitter:
    folder = os.environ.get(SPOOL_VARIABLE, "")
    if not folder:
        return NullEmitter()
    if _log.level == logging.NOTSET:
        # vLLM's API server ends up with a root logger that passes errors only; what is said once must not get lost.
        _log.setLevel(logging.WARNING)
    try:
        # Absolute, since a server may go elsewhere while its files are followed by others.
        emitter = Emitter(Path(folder).absolute(), _budget_bytes())
        emitter.fact("kvtrace", __version__)
        emitter.fact("argv0", sys.argv[0] if sys.argv else "")
    except Exception as error:  # noqa: BLE001 - tracing never raises into its host
        _log.warning("kvtrace is off in process %d: cannot write to %s: %s", os.getpid(), folder, error)
        return NullEmitter()
    return emitter


def _budget_bytes() -> int:
    text = os.environ.get(BUDGET_VARIABLE, "")
    if not text:
        return BUDGET_BYTES
    try:
        return max(int(float(text)), 0)
    except (ValueError, OverflowError):
        _log.warning("kvtrace ignores %s=%r: not a number of bytes", BUDGET_VARIABLE, text)
        return BUDGET_BYTES
