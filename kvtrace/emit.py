"""The emit side's only door: `tracer()` is this process's emitter, or one that does nothing where tracing is off.

`Emitter.emit` takes a slot, stamps it and fills it with one `pack_into`; it never waits and never raises. What can go
wrong goes wrong on the slow path below it (a string's first use, the end of a window, an odd value) or on the spool
thread, which keeps a window in reserve, writes the clock anchors and counts what was lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import queue
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtrace import __version__, clock, stages, wire
from kvtrace.spool import BUDGET_BYTES, Link, Segment, Spool, Window, empty_window

SPOOL_VARIABLE = "KVTRACE_SPOOL"
BUDGET_VARIABLE = "KVTRACE_SPOOL_BUDGET"

TICK_S = 1.0  # between clock anchors
RETRY_S = 0.25  # between attempts to find room
BEGIN_WAIT_S = 0.02  # in a forked child, a second thread waits this long for the first to open the series
_HOPS_MAX = 64  # windows that one event may walk past before it counts as dropped

_log = logging.getLogger("kvtrace")
_now = time.monotonic_ns
_pack = wire.RECORD.pack_into
_pack_chunk = wire.CHUNK.pack_into
_INT_MAX = 2**63 - 1
_ZEROS = (0, 0, 0, 0)


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


class Emitter(NullEmitter):
    """Writes events to the process's spool. Any thread may call any method at any time."""

    def __init__(self, folder: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        """Open the series in `folder`; raise OSError if not even its first window can be had."""
        self.enabled = True
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._facts: dict[str, str] = {}
        self._facts_version = 0
        self._disabling = iter((True,))
        self._reset()
        folder.mkdir(parents=True, exist_ok=True)
        self._window = self._grow()
        self._provide()
        self._start_thread()
        self._begun = True
        _emitters.add(self)

    def _reset(self) -> None:
        self._begun = False
        self._begin_lock = threading.Lock()
        self._tend_lock = threading.Lock()
        self._window: Window = empty_window()
        self._spool = Spool(self._folder, self._budget_bytes)
        self._segments: list[Segment] = []  # those not left yet, oldest first
        self._retired: list[Segment] = []  # left, and perhaps still mapped for a thread inside emit()
        self._dropped: dict[int, Iterator[int]] = {}
        self._dropped_told: dict[int, int] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ticked_ns = 0
        self._trouble = ""

    # On threads that emit ----------------------------------------------------------------------------

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
        except Exception:  # noqa: BLE001 - a string's first use, or a value that does not fit
            if offset:
                _pack(buffer, offset, 0, *_ZEROS, 0, 0, wire.VOID, offset)
        self._emit_slowly(code, request, (a, b, c, d), ref, t_ns)

    def _emit_slowly(self, code: object, request: object, numbers: tuple[object, ...], ref: object, t_ns: object) -> None:
        if not self.enabled:
            return
        stage = 0
        try:
            stamp_ns = _whole(t_ns, 0, _INT_MAX) or _now()
            stage = _whole(code, 0, wire.VOID - 1)
            values = tuple(_whole(value, -_INT_MAX - 1, _INT_MAX) for value in numbers)
            if not self._begun:
                self._begin()
            if not self._put(stage, stamp_ns, values, _text(request), _text(ref)):
                self._drop(stage)
        except Exception as error:  # noqa: BLE001 - tracing never raises into its host
            self._drop(stage)
            self.disable("emit", error)

    def _put(self, code: int, t_ns: int, numbers: tuple[int, ...], request: str, ref: str) -> bool:
        """Write one record into the current window or one that follows it; return whether there was room."""
        for _ in range(_HOPS_MAX):
            window = self._window
            if _write(window, code, t_ns, numbers, request, ref):
                return True
            following = window[3].next
            if following is None:
                return False
            self._window = following  # a slower thread may set it back: its next event walks on again
            self._wake.put(None)
        return False

    def _drop(self, code: int) -> None:
        counter = self._dropped.get(code)
        if counter is None:
            counter = self._dropped.setdefault(code, itertools.count(1))
        count = next(counter)
        segment = self._window[3].segment
        if segment is not None:
            segment.count_drops(code, count)

    def _begin(self) -> None:
        """Open a forked child's own series at its first event."""
        if not self._begin_lock.acquire(timeout=BEGIN_WAIT_S):
            return
        try:
            if not self._begun:
                try:
                    self._window = self._grow()
                except OSError as error:
                    self._fail(error)
                self._start_thread()
                self._begun = True
        finally:
            self._begin_lock.release()

    def fact(self, name: str, value: str) -> None:
        """Record something that holds for the process; it is repeated in each of its files. Never prompts or tokens."""
        if self.enabled and self._facts.get(name) != value:
            self._facts[_text(name)] = _text(value)
            self._facts_version += 1
            if self._begun:
                self._put(wire.FACT, _now(), _ZEROS, _text(name), _text(value))
                self._wake.put(None)

    def disable(self, where: str, error: BaseException | str) -> None:
        """Switch tracing off in this process: one record, one log line; later calls do nothing."""
        if not self.enabled or not next(self._disabling, False):
            return
        reason = f"{where}: {type(error).__name__}: {error}" if isinstance(error, BaseException) else f"{where}: {error}"
        with contextlib.suppress(Exception):
            self._put(stages.DISABLED.code, _now(), _ZEROS, "", reason)
        self._switch_off()
        _log.warning("kvtrace switched itself off in process %d, serving goes on: %s", os.getpid(), reason)

    def _switch_off(self) -> None:
        self.enabled = False
        self._window = iter(()), empty_window()[1], _AnyId(), Link(self._window[3].segment)
        self._wake.put(None)

    def flush(self) -> None:
        """Do now what the spool thread does within a second."""
        with self._tend_lock:
            self._tend(now=True)

    def close(self) -> None:
        """End the series: its files are marked as left, later calls do nothing."""
        thread = self._thread
        if self.enabled:
            self.flush()
            self._switch_off()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    # On the spool thread -----------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvtrace-spool", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.enabled:
            wait_s = RETRY_S if self._trouble else max(TICK_S - (_now() - self._ticked_ns) / 1e9, 0.001)
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=wait_s)
                while True:  # one turn answers every call so far
                    self._wake.get_nowait()
            if self.enabled:
                try:
                    with self._tend_lock:
                        self._tend()
                except Exception as error:  # noqa: BLE001 - tracing never raises into its host
                    self.disable("spool thread", error)
        for segment in self._segments:
            segment.seal()

    def _tend(self, *, now: bool = False) -> None:
        self._provide()
        self._leave()
        for segment in self._segments:
            self._repeat_facts(segment)
        if now or _now() - self._ticked_ns >= TICK_S * 1e9:
            self._ticked_ns = _now()
            self._replace_vanished()
            _anchor(self._put)
            self._tell_drops()

    def _provide(self) -> None:
        """Keep a window in reserve behind the current one."""
        for _ in range(_HOPS_MAX):
            link = self._window[3]
            if link.next is not None:
                return
            try:
                link.next = self._grow()
            except OSError as error:
                self._fail(error)
                return

    def _grow(self, *, anew: bool = False) -> Window:
        window = self._spool.grow(anew=anew)
        segment = window[3].segment
        assert segment is not None  # noqa: S101 - grow returns windows in files
        if segment not in self._segments:
            for code, count in self._drops().items():
                segment.count_drops(code, count)
            _anchor(lambda *record: _write(window, *record))
            self._repeat_facts(segment, window)
            self._segments.append(segment)
        if self._trouble:
            _log.warning("kvtrace records again in process %d", os.getpid())
            self._trouble = ""
        return window

    def _fail(self, error: OSError) -> None:
        if not self._trouble:
            _log.warning("kvtrace drops and counts events in process %d until there is room: %s", os.getpid(), error)
        self._trouble = str(error)

    def _leave(self) -> None:
        """Seal the files that every thread has left, and unmap those that no thread can still write to."""
        current = self._window[3].segment
        if current in self._segments:
            while self._segments[0] is not current:
                segment = self._segments.pop(0)
                segment.seal()
                self._retired.append(segment)
        self._retired = [segment for segment in self._retired if not segment.released()]

    def _repeat_facts(self, segment: Segment, window: Window | None = None) -> None:
        version = self._facts_version
        if segment.facts_version == version:
            return
        if window is None and segment is not self._window[3].segment:
            following = self._window[3].next
            window = following if following is not None and following[3].segment is segment else None
        if window is not None:
            for name, value in dict(self._facts).items():
                _write(window, wire.FACT, _now(), _ZEROS, name, value)
        segment.facts_version = version

    def _replace_vanished(self) -> None:
        """Where somebody removed the file being written, count its records as lost and begin another."""
        vanished = [segment for segment in self._segments if segment.vanished()]
        if not vanished:
            return
        left, self._segments = self._segments, []
        window = empty_window()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            window = self._grow(anew=True)
        except OSError as error:
            self._fail(error)
        self._window = window
        lost: Counter[int] = Counter()
        for segment in left:
            segment.seal()
            if segment in vanished:
                lost += segment.counts()
        counts = self._drops()
        for code, count in lost.items():
            self._dropped[code] = itertools.count(counts.get(code, 0) + count + 1)
        self._retired += left
        self._provide()

    def _drops(self) -> dict[int, int]:
        """Return how many records of each stage code were dropped so far."""
        return {code: int(repr(counter)[6:-1]) - 1 for code, counter in dict(self._dropped).items()}

    def _tell_drops(self) -> None:
        segment = self._window[3].segment
        for code, count in self._drops().items():
            if segment is not None:
                segment.count_drops(code, count)
            if count != self._dropped_told.get(code) and self._put(
                stages.DROPPED.code, _now(), (code, count, 0, 0), "", ""
            ):
                self._dropped_told[code] = count

    def _after_fork(self) -> None:
        """Leave the parent's files alone: the child opens its own series when it first emits."""
        for segment in self._segments + self._retired:
            with contextlib.suppress(OSError):
                os.close(segment.fd)
        if self.enabled:
            self._reset()


class _AnyId(dict[str, int]):
    def __missing__(self, _key: str) -> int:
        return 0


def _write(window: Window, code: int, t_ns: int, numbers: tuple[int, ...], request: str, ref: str) -> bool:
    """Write one record and the strings that it needs into a window; return whether there was room."""
    slots, buffer, ids, _ = window
    request_id = ids.get(request)
    if request_id is None:
        request_id = _intern(window, request)
    ref_id = ids.get(ref)
    if ref_id is None:
        ref_id = _intern(window, ref)
    if request_id is None or ref_id is None:
        return False
    for offset in slots:
        _pack(buffer, offset, t_ns, *numbers, request_id, ref_id, code, offset)
        return True
    return False


def _intern(window: Window, text: str) -> int | None:
    """Write a string's chunks and return its id, or None if the window has no room for them all.

    Two threads may write one string at the same time: it then has two ids, which is harmless.
    """
    slots, buffer, ids, _ = window
    data = wire.encode_text(text)
    identity = 0
    for number, chunk in enumerate(wire.split_text(data)):
        offset = next(slots, 0)
        if not offset:
            return None
        identity = identity or offset // wire.RECORD_BYTES
        _pack_chunk(buffer, offset, chunk, identity, number, len(data), wire.STRING, offset)
    ids[text] = identity
    return identity


def _anchor(put: object) -> None:
    anchor = clock.read_anchor()
    put(stages.ANCHOR.code, anchor.monotonic_ns, (anchor.wall_ns, anchor.uncertainty_ns, 0, 0), "", "")  # type: ignore[operator]


def _whole(value: object, least: int, most: int) -> int:
    """Return any number as an integer inside the bounds; 0 for what is no number."""
    try:
        number = operator.index(value) if not isinstance(value, float) else int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 0
    return min(max(number, least), most)


def _text(value: object) -> str:
    """Return any value as the string that stands for it on the wire: "" for None, longer than the limit is cut."""
    text = value if type(value) is str else "" if value is None else str(value)
    return text if len(text) * 3 <= wire.TEXT_BYTES_MAX else wire.encode_text(text).decode()


def _after_fork_in_child() -> None:
    for emitter in list(_emitters):
        emitter._after_fork()  # noqa: SLF001


_emitters: weakref.WeakSet[Emitter] = weakref.WeakSet()
_tracer: NullEmitter | None = None
_tracer_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork_in_child)


def tracer() -> NullEmitter:
    """Return the process-wide emitter; one that does nothing when KVTRACE_SPOOL is unset or its folder unusable."""
    global _tracer  # noqa: PLW0603
    if _tracer is None:
        with _tracer_lock:
            if _tracer is None:
                _tracer = _from_environment()
    return _tracer


def _from_environment() -> NullEmitter:
    folder = os.environ.get(SPOOL_VARIABLE, "")
    if not folder:
        return NullEmitter()
    try:
        emitter = Emitter(Path(folder), _budget_bytes())
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
