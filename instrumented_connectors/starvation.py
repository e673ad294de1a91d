"""For how long a thread could have run and had no processor: what the kernel counts for it."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from typing import NamedTuple

_FILE = "/proc/thread-self/schedstat"
_READ_BYTES = 96
# os.pread lets go of the interpreter's lock: a sender thread takes it then, and the forward's waits 50 us for it.
_pread = ctypes.PyDLL(None).pread
_pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64)
_pread.restype = ctypes.c_ssize_t
_forks = [0]
"""How often this process's line has forked, which tells a child from its parent without a system call."""
WORTH_NS = 100_000
"""A stretch in which a thread was without a processor for less is not worth an event."""


class Starvation:
    """The kernel's count for the thread that reads it first; 1.3 us a reading. No other thread may read it.

    With the file of a certain thread it counts for that one, whoever reads it, and still one thread alone may.
    """

    def __init__(self, file: str = _FILE) -> None:
        self._path = file
        self._file: int | None = None
        self._forks = -1
        self._text = ctypes.create_string_buffer(_READ_BYTES)

    def starved_ns(self) -> int:
        """Return for how long the thread has been without a processor since it began, in ns; 0 where nobody says."""
        try:
            if self._forks != _forks[0]:  # the file stays that of the thread which opened it, also in a forked child
                self._open()
            if self._file is None:
                return 0
            length = _pread(self._file, self._text, _READ_BYTES, 0)
            return int(self._text.raw[: max(0, length)].split()[1])
        except (OSError, ValueError, IndexError):
            return 0

    def close(self) -> None:
        """Let go of the kernel's file."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._forks = _forks[0]
        self.close()
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        """Keep no file open behind the connector that it was read for."""
        self.close()


def _forked() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_forked)


class _OwnCount(threading.local):
    """Each thread's own reader: the kernel's file belongs to the thread that opened it."""

    def __init__(self) -> None:
        self.kernel = Starvation()


_own = _OwnCount()


def starved_ns() -> int:
    """Return for how long the thread that calls has been without a processor since it began, in ns.

    0 where nobody says, so that a difference is 0 too. A reading takes 1.4 us in a loop, and 5 to 10 us behind a
    forward, which leaves nothing of it in the processor's caches.
    """
    return _own.kernel.starved_ns()


class Look(NamedTuple):
    """A moment of a thread (CLOCK_MONOTONIC), and for how long it had been without a processor until then."""

    t_ns: int
    count_ns: int
    thread: int

    @classmethod
    def at(cls, now: int) -> Look:
        """Return the moment `now` of the thread that calls."""
        return cls(now, starved_ns(), threading.get_ident())

    def starved_since_ns(self, before: Look) -> int:
        """Return for how long the thread had no processor since a moment before, in ns; 0 if that was another's."""
        if self.thread != before.thread:
            return 0
        return min(max(0, self.count_ns - before.count_ns), self.t_ns - before.t_ns)
