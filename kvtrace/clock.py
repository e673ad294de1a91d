"""Clocks: one reading of monotonic and wall time taken together, and what tells two monotonic clocks apart.

Events are stamped with CLOCK_MONOTONIC, which processes of one clock domain (one boot of one kernel, one
time namespace) share exactly. Anchors carry them to wall time and to other hosts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

monotonic_ns = time.monotonic_ns

_READINGS = 3  # the tightest of a few: a thread switch inside one widens only that one


@dataclass(frozen=True, slots=True)
class Anchor:
    """One moment on both clocks; `uncertainty_ns` is the time between the two monotonic readings around the wall's."""

    monotonic_ns: int
    wall_ns: int
    uncertainty_ns: int


def read_anchor() -> Anchor:
    """Return the tightest of a few readings, its monotonic time in the middle of the pair around the wall's."""
    best: Anchor | None = None
    for _ in range(_READINGS):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        if best is None or after_ns - before_ns < best.uncertainty_ns:
            best = Anchor((before_ns + after_ns) // 2, wall_ns, after_ns - before_ns)
    assert best is not None  # noqa: S101 - the loop runs
    return best


def boot_id() -> str:
    """Return the kernel's id of this boot, the same in every container of the host; "" where there is none."""
    return _read("/proc/sys/kernel/random/boot_id")


def time_namespace() -> str:
    """Return the inode of this process's time namespace: monotonic clocks of two namespaces may differ."""
    return _inode("/proc/self/ns/time")


def pid_namespace() -> str:
    """Return the inode of this process's pid namespace: a pid means nothing outside it."""
    return _inode("/proc/self/ns/pid")


def domain() -> str:
    """Return the name of this process's clock domain: boot id and time namespace."""
    return f"{boot_id()}/{time_namespace()}"


def process_start_ticks(pid: int) -> int:
    """Return when a process of this pid namespace started, in clock ticks since boot; 0 if it does not exist."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":  # a zombie writes nothing more
        return 0
    return int(fields[19])


def process_start_wall_ns(pid: int) -> int:
    """Return when a process started, in Unix ns, to a clock tick (10 ms); 0 if it cannot be told."""
    ticks = process_start_ticks(pid)
    if not ticks:
        return 0
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _inode(path: str) -> str:
    try:
        return str(Path(path).stat().st_ino)
    except OSError:
        return ""
