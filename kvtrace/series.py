"""One process's series of spool files while it is written: the window in use, the one in reserve, what was lost.

Threads that emit call `put` and `drop`, which never wait. The process's one spool thread runs `tend` whenever a window
was used up, and every second. It keeps the host's priority on purpose: a thread of lower priority that is preempted
while it holds the interpreter lock would make the host wait.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvtrace import clock, stages, wire
from kvtrace.spool import Link, Segment, Spool, SpoolGoneError, Window, empty_window, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TICK_S = 1.0  # between clock anchors
RETRY_S = 0.25  # between attempts to find room
SILENT_NS = 60_000_000_000  # room that comes and goes is not worth a line each time
_HOPS_MAX = 64  # windows that one event may walk past before it counts as dropped

NO_NUMBERS = (0, 0, 0, 0)
_log = logging.getLogger("kvtrace")
_now = time.monotonic_ns


class Series:
    """The files of one process, oldest first; a forked child begins its own."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.enabled = True
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._facts: dict[str, str] = {}
        self._facts_version = 0
        self._window: Window = empty_window()
        self._reset()

    def _reset(self) -> None:
        self._tend_lock = threading.Lock()
        self._window = empty_window()
        self._spool = Spool(self._folder, self._budget_bytes)
        self._segments: list[Segment] = []  # those not left yet, oldest first
        self._retired: list[Segment] = []  # left, and perhaps still mapped for a thread inside emit()
        self._dropped: dict[int, Iterator[int]] = {}
        self._dropped_told: dict[int, int] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ticked_ns = 0
        self._trouble = ""
        self._is_said = False
        self._may_say_ns = 0

    # On any thread -----------------------------------------------------------------------------------

    def put(self, code: int, t_ns: int, numbers: tuple[int, ...], request: str, ref: str) -> bool:
        """Write one record into the current window or one that follows it; return whether there was room."""
        for _ in range(_HOPS_MAX):
            window = self._window
            if write(window, code, t_ns, numbers, request, ref):
                return True
            following = window[3].next
            if following is None:
                return False
            self._window = following  # a slower thread may set it back: its next event walks on again
            self._wake.put(None)
        return False

    def drop(self, code: int) -> None:
        """Count one record of a stage as lost."""
        counter = self._dropped.get(code)
        if counter is None:
            counter = self._dropped.setdefault(code, itertools.count(1))
        count = next(counter)
        segment = self._window[3].segment
        if segment is not None:
            segment.count_drops(code, count)

    def dropped(self) -> dict[int, int]:
        """Return how many records of each stage code were lost so far."""
        return {code: int(repr(counter)[6:-1]) - 1 for code, counter in dict(self._dropped).items()}

    def state_fact(self, name: str, value: str) -> None:
        """Write a fact now and into every later file."""
        self._facts[name] = value
        self._facts_version += 1
        self.put(wire.FACT, _now(), NO_NUMBERS, name, value)
        self._wake.put(None)

    def switch_off(self) -> None:
        """Make every later event a no-op and let the spool thread end."""
        self.enabled = False
        self._window = iter(()), empty_window()[1], _AnyId(), Link(self._window[3].segment)
        self._wake.put(None)

    # On the spool thread -----------------------------------------------------------------------------

    def start_thread(self, on_error: Callable[[str, Exception], None]) -> None:
        """Start the spool thread; `on_error` hears of what it cannot handle."""
        self._thread = threading.Thread(target=self._run, args=(on_error,), name="kvtrace-spool", daemon=True)
        self._thread.start()

    def _run(self, on_error: Callable[[str, Exception], None]) -> None:
        while self.enabled:
            wait_s = RETRY_S if self._trouble else max(TICK_S - (_now() - self._ticked_ns) / 1e9, 0.001)
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=wait_s)
                while True:  # one turn answers every call so far
                    self._wake.get_nowait()
            if self.enabled:
                try:
                    self.tend()
                except Exception as error:  # noqa: BLE001 - tracing never raises into its host
                    on_error("spool thread", error)
        for segment in self._segments:
            segment.seal()

    def tend(self, *, now: bool = False) -> None:
        """Keep a window in reserve, leave used files; each second (or `now`) write an anchor and the losses."""
        with self._tend_lock:
            self._provide()
            self._leave()
            for segment in self._segments:
                self._repeat_facts(segment)
            if now or _now() - self._ticked_ns >= TICK_S * 1e9:
                self._ticked_ns = _now()
                self._catch_up()
                self._replace_vanished()
                _anchor(self.put)
                self._tell_drops()

    def _catch_up(self) -> None:
        """Move on from a file that was left, where a slow thread has set the window back to it."""
        window = self._window
        while window[3].segment not in self._segments and (following := window[3].next) is not None:
            window = self._window = following

    def begin(self, *, reserve: bool) -> None:
        """Make the first window, and the one in reserve with it; raise OSError if there is no room."""
        self._window = self._grow()
        if reserve:
            self._provide()

    def _provide(self) -> None:
        for _ in range(_HOPS_MAX):
            link = self._window[3]
            if link.next is not None:
                return
            try:
                link.next = self._grow()
            except OSError as error:
                self.fail(error)
                return

    def _grow(self) -> Window:
        window = self._spool.grow()
        segment = window[3].segment
        if segment is not None and segment not in self._segments:
            for code, count in self.dropped().items():
                segment.count_drops(code, count)
            _anchor(lambda *record: write(window, *record))
            self._repeat_facts(segment, window)
            self._segments.append(segment)
        if self._is_said:
            _log.warning("kvtrace records again in process %d", os.getpid())
            self._is_said = False
        self._trouble = ""
        return window

    def fail(self, error: OSError) -> None:
        """Say that there is no room, once for each trouble and at most once a minute; the spool thread keeps trying.

        Raises SpoolGoneError, behind which there is nothing to wait for.
        """
        if isinstance(error, SpoolGoneError):
            raise error
        if not self._is_said and _now() >= self._may_say_ns:
            _log.warning("kvtrace drops and counts events in process %d until there is room: %s", os.getpid(), error)
            self._is_said, self._may_say_ns = True, _now() + SILENT_NS
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
                write(window, wire.FACT, _now(), NO_NUMBERS, name, value)
        segment.facts_version = version

    def _replace_vanished(self) -> None:
        """Where somebody removed the file being written, count its records as lost and begin another.

        A recorder that still had the removed file open may have read some of them: then the count is too high.
        """
        vanished = [segment for segment in self._segments if segment.vanished()]
        if not vanished:
            return
        left, self._segments = self._segments, []
        window = empty_window()
        self._spool.leave()
        try:
            window = self._grow()
        except OSError as error:
            if isinstance(error, SpoolGoneError):
                self._segments = left  # to be sealed when the thread ends
            self.fail(error)
        last = self._window[3]
        while last.next is not None:
            last = last.next[3]
        self._window = last.next = window
        lost: Counter[int] = Counter()
        for segment in left:
            segment.seal()
            if segment in vanished:
                lost += segment.counts()
        counts = self.dropped()
        for code, count in lost.items():
            self._dropped[code] = itertools.count(counts.get(code, 0) + count + 1)
        self._retired += left
        self._provide()

    def _tell_drops(self) -> None:
        segment = self._window[3].segment
        for code, count in self.dropped().items():
            if segment is not None:
                segment.count_drops(code, count)
            if count != self._dropped_told.get(code):
                told = self.put(stages.DROPPED.code, _now(), (code, count, 0, 0), "", "")
                self._dropped_told[code] = count if told else -1

    def leave_to_parent(self) -> None:
        """In a forked child: forget the parent's files without touching them."""
        for segment in self._segments + self._retired:
            with contextlib.suppress(OSError):
                os.close(segment.fd)
        if self.enabled:
            self._reset()


class _AnyId(dict[str, int]):
    def __missing__(self, _key: str) -> int:
        return 0


def _anchor(put: Callable[[int, int, tuple[int, ...], str, str], bool]) -> None:
    anchor = clock.read_anchor()
    put(stages.ANCHOR.code, anchor.monotonic_ns, (anchor.wall_ns, anchor.uncertainty_ns, 0, 0), "", "")
