"""Spool files being written: space is reserved before it is mapped, handed out in windows, counted against a budget.

A file grows window by window, so an idle process holds a few hundred KiB plus one window in reserve, and a busy one
needs a single system call for the next. `Spool.grow` makes the next window; everything that waits for the kernel is
in here and runs on the process's own spool thread, never on a thread that emits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtrace import clock, wire

EVENTS_OF_AN_HOUR = 7_200_000  # 2,000 events a second
BUDGET_BYTES = EVENTS_OF_AN_HOUR * wire.RECORD_BYTES * 5 // 4  # a quarter on top for strings, anchors and headers

FIRST_BYTES = 256 * 1024  # a process's first window, and the least that the next one is scaled down to in steps of two
RESERVE_BYTES_MAX = 8 * 1024 * 1024  # the window held in reserve: 131,072 records
ROOM_SHARE = 1024  # of the free room, one part of this many at most is held in reserve
ROTATE_BYTES = 4 * 1024 * 1024  # a file of this size is followed by a new one, unless windows fill as fast as this:
PRESSED_NS = 250_000_000
SEGMENT_BYTES_MAX = 64 * 1024 * 1024  # address space set aside per file; memory and disk are used window by window
LEAST_BYTES = 16 * 1024  # a smaller window is not worth a file
FLOOR_SHARE = 32  # the last 1/32 of the file system is left to others: a full /dev/shm would harm the engine itself
FAULT_BYTES_MAX = 4 * 1024 * 1024  # pages touched in advance, so that an event does not pay for the page fault

PRIVATE_PREFIX = "kvtrace-spool-"
"""How the name of a folder begins that a recorder makes for itself and takes away when the recording is over."""

Window = tuple[Iterator[int], mmap.mmap, dict[str, int], "Link"]  # slots, file, string ids, what comes after


class SpoolGoneError(FileNotFoundError):
    """The private folder of a recording is gone: the recording is over, and nobody would read a new one."""


class Link:
    """The tail of a window: its file (None: there is none yet) and, once it exists, the window that follows."""

    __slots__ = ("next", "segment")

    def __init__(self, segment: Segment | None) -> None:
        self.segment = segment
        self.next: Window | None = None


def empty_window() -> Window:
    """Return a window without slots, which other windows can follow."""
    return iter(()), _NOTHING, {"": 0}, Link(None)


def write(window: Window, code: int, t_ns: int, numbers: tuple[int, ...], request: str, ref: str) -> bool:
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


def intern_short(window: Window, text: object) -> bool:
    """Make a usual request id known to a window in one go; return False for what `write` has to deal with."""
    slots, buffer, ids, _ = window
    if type(text) is not str or len(text) > 2 * wire.CHUNK_BYTES or not text.isascii():
        return False
    if text in ids:
        return True
    first = next(slots, 0)
    second = next(slots, 0) if len(text) > wire.CHUNK_BYTES else first
    if not second:
        return False
    data, identity = text.encode(), first // wire.RECORD_BYTES
    _pack_chunk(buffer, first, data, identity, 0, len(data), wire.STRING, first)
    if second != first:
        _pack_chunk(buffer, second, data[wire.CHUNK_BYTES :], identity, 1, len(data), wire.STRING, second)
    ids[text] = identity
    return True


_NOTHING = mmap.mmap(-1, mmap.PAGESIZE)
_pack = wire.RECORD.pack_into
_pack_chunk = wire.CHUNK.pack_into


def host_id(hostname: str) -> str:
    """Return 12 hex digits that stand for this host, the same after a restart."""
    machine = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            machine = machine or Path(path).read_text("ascii", "replace").strip()
    return hashlib.blake2s(f"{machine} {hostname}".encode(), digest_size=6).hexdigest()


class Segment:
    """One spool file of this process: mapped whole, reserved up to `end`."""

    def __init__(self, folder: Path, header: wire.SegmentHeader, first_bytes: int) -> None:
        """Create the file with its first window reserved; it appears under its name when its header is complete."""
        self.path = folder / wire.segment_name(header.series, header.number)
        self.ids: dict[str, int] = {"": 0}
        self.end = 0
        self.facts_version = -1
        hidden = folder / f".{self.path.name}.new"
        self.fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self.reserve(first_bytes)
            # The mapping spans the largest size that the file may reach; only reserved windows are ever touched.
            os.ftruncate(self.fd, SEGMENT_BYTES_MAX)
            self.mm = mmap.mmap(self.fd, SEGMENT_BYTES_MAX)
            os.ftruncate(self.fd, first_bytes)
            self.mm[: wire.HEADER_BYTES] = wire.pack_header(header)
            os.rename(hidden, self.path)
            self.inode = os.fstat(self.fd).st_ino
        except BaseException:
            os.close(self.fd)
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise

    def reserve(self, size: int) -> None:
        """Reserve the file's next `size` bytes, or raise OSError and leave it as it was."""
        try:
            os.posix_fallocate(self.fd, self.end, size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.end)
            raise
        self.end += size

    def window(self, start: int, fault_bytes: int) -> Window:
        """Return the reserved bytes from `start` on as a window, its first `fault_bytes` touched in advance."""
        first = max(start, wire.HEADER_BYTES)
        if fault_bytes > 0 and self.end > first:
            with open("/dev/zero", "rb", buffering=0) as zeros, memoryview(self.mm) as view:
                # Zeros over zeros: the kernel maps the pages, without the interpreter lock.
                zeros.readinto(view[first : min(self.end, first + fault_bytes)])
        slots = iter(range(first, self.end, wire.RECORD_BYTES))
        return slots, self.mm, self.ids, Link(self)

    def count_drops(self, code: int, count: int) -> None:
        """Say in the header how many records of a stage the process has dropped so far."""
        with contextlib.suppress(ValueError):  # unmapped meanwhile: the next file says it
            wire.COUNTER.pack_into(self.mm, wire.drop_offset(code), count)

    def vanished(self) -> bool:
        """Return whether the file is gone from its folder."""
        try:
            return self.path.stat().st_ino != self.inode
        except OSError:
            return True

    def counts(self) -> Counter[int]:
        """Return how many records of each code the file holds."""
        with memoryview(self.mm) as raw, raw[: self.end] as reserved:
            codes = Counter(reserved.cast("H")[wire.HEADER_BYTES // 2 + 24 :: 32])
        return Counter({code: count for code, count in codes.items() if 0 < code < wire.VOID})

    def seal(self) -> None:
        """Say in the header that the writer has left the file."""
        wire.COUNTER.pack_into(self.mm, wire.SEALED_OFFSET, time.monotonic_ns())

    def released(self) -> bool:
        """Unmap the file if no thread can still write to it; return whether it is unmapped."""
        if sys.getrefcount(self.mm) > 2:  # this object's and the argument's
            return False
        self.mm.close()
        os.close(self.fd)
        return True


class Spool:
    """One process's series of files in a folder."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        hostname = socket.gethostname()
        self._host = (host_id(hostname), hostname, clock.boot_id(), clock.domain(), wire.vocabulary_print())
        self.series = f"{self._host[0]}-{os.getpid()}-{os.urandom(4).hex()}"
        self._number = 0
        self._segment: Segment | None = None
        self._sizes: dict[Path, int] = {}
        self._windows = 0
        self._grown_ns = 0
        self._window_bytes = FIRST_BYTES

    def leave(self) -> None:
        """Have the next window begin a new file."""
        self._segment = None

    def grow(self) -> Window:
        """Return the window that follows the newest, in the same file or a new one; raise OSError without room."""
        if self._segment is None:
            self._make_folder()
        now_ns = time.monotonic_ns()
        pressed = now_ns - self._grown_ns < PRESSED_NS
        size = self._next_bytes(pressed=pressed)
        fault_bytes = 0 if pressed else FAULT_BYTES_MAX
        segment = self._segment
        is_full = segment is not None and segment.end + size > (SEGMENT_BYTES_MAX if pressed else ROTATE_BYTES)
        if segment is None or is_full:
            window = self._create(size, fault_bytes)
        else:
            start = segment.end
            segment.reserve(size)
            self._sizes[segment.path] = segment.end
            window = segment.window(start, fault_bytes)
        self._grown_ns = now_ns if self._windows else 0  # the reserve is made right after the first: no sign of haste
        self._windows += 1
        self._window_bytes = size
        return window

    def _make_folder(self) -> None:
        if not self.folder.name.startswith(PRIVATE_PREFIX):
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not self.folder.is_dir():
            raise SpoolGoneError(errno.ENOENT, "the recording that it was made for is over", str(self.folder))

    def used_bytes(self) -> int:
        """Return the bytes of this series' files that are still in the folder."""
        for path in list(self._sizes):
            if not path.exists():
                del self._sizes[path]
        return sum(self._sizes.values())

    def _next_bytes(self, *, pressed: bool) -> int:
        room = os.statvfs(self.folder)
        has_limit = room.f_blocks > 0  # a tmpfs without a limit calls itself empty and full
        free_bytes = room.f_bavail * room.f_frsize if has_limit else sys.maxsize
        wanted = RESERVE_BYTES_MAX
        while wanted > FIRST_BYTES and wanted > free_bytes // ROOM_SHARE:
            wanted //= 2
        if self._number == 0:
            wanted = FIRST_BYTES
        elif pressed:
            wanted = min(max(wanted, self._window_bytes * 2), SEGMENT_BYTES_MAX // 4)
        spare_bytes = free_bytes - room.f_blocks * room.f_frsize // FLOOR_SHARE
        left_bytes = self.budget_bytes - sum(self._sizes.values())
        if left_bytes < wanted:
            left_bytes = self.budget_bytes - self.used_bytes()
        while wanted > min(spare_bytes, left_bytes):
            wanted //= 2
            if wanted < LEAST_BYTES:
                if left_bytes < LEAST_BYTES:
                    raise OSError(errno.EDQUOT, f"the spool's budget of {self.budget_bytes} bytes is spent")
                raise OSError(errno.ENOSPC, f"no room left in {self.folder}")
        return wanted

    def _create(self, size: int, fault_bytes: int) -> Window:
        anchor = clock.read_anchor()
        pid = os.getpid()
        host, hostname, boot, domain, vocabulary = self._host
        namespace = clock.pid_namespace()
        header = wire.SegmentHeader(
            series=self.series, number=self._number, capacity=SEGMENT_BYTES_MAX // wire.RECORD_BYTES,
            pid=pid, parent_pid=os.getppid(), pid_namespace=int(namespace or 0),
            start_ticks=clock.process_start_ticks(pid), started_ns=clock.process_start_wall_ns(pid),
            anchor_monotonic_ns=anchor.monotonic_ns, anchor_wall_ns=anchor.wall_ns,
            anchor_uncertainty_ns=anchor.uncertainty_ns,
            host_id=host, hostname=hostname, boot_id=boot, domain=domain, vocabulary=vocabulary,
        )  # fmt: skip
        segment = Segment(self.folder, header, size)
        self._number += 1
        self._segment = segment
        self._sizes[segment.path] = segment.end
        return segment.window(0, fault_bytes)
