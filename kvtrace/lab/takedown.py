"""Ending what a lab started, all of it: servers, the engine processes behind them, their shared memory.

vLLM's engine processes outlive an API server that was killed, and setproctitle overwrites the environment that
/proc shows. So members are found by the process group that their first process leads, and by
environment as a second net.
Standard library only: the guard runs this file by itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARKER = "KVTRACE_LAB"
GRACE_S = 10.0
REAPED_S = 2.0
_TRACKER_GRACE_S = 1.0
_PROC = Path("/proc")
_SHM = "/dev/shm/"  # noqa: S108 -- where POSIX shared memory is, by definition
_TRACKER = b"multiprocessing.resource_tracker"


@dataclass(slots=True)
class Members:
    """The processes of one lab."""

    marker: str
    groups: dict[int, int] = field(default_factory=dict)
    """Process id of each group's first process -> its start time, in clock ticks since boot."""

    def add(self, pid: int) -> None:
        """Take in the process group that `pid` leads."""
        status = _status(pid)
        self.groups[pid] = status.started_ticks if status else 0

    def alive(self) -> list[int]:
        """Return the process ids of all members that run, zombies left out."""
        return [pid for pid in _pids() if self._has(pid)]

    def _has(self, pid: int) -> bool:
        """Return whether `pid` runs and belongs to this lab."""
        status = _status(pid)
        if status is None or status.state in "ZX" or pid == os.getpid():
            return False
        return self._is_grouped(status) or self._is_marked(pid)

    def _is_grouped(self, status: _Status) -> bool:
        """Return whether a process is in a group that a member leads or led."""
        if status.group not in self.groups:
            return False
        leader = _status(status.group)
        return leader is None or leader.started_ticks == self.groups[status.group]

    def zombies(self) -> list[int]:
        """Return the process ids of members that have ended and that nobody has taken note of yet."""
        found = [(pid, _status(pid)) for pid in _pids()]
        return [pid for pid, status in found if status and status.state == "Z" and self._is_grouped(status)]

    def _is_marked(self, pid: int) -> bool:
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            return False
        return f"{MARKER}={self.marker}".encode() in environment.split(b"\0")


def end(members: Members, leaders: list[int], grace_s: float) -> list[int]:
    """Ask `leaders` to end, kill what is left after `grace_s`, and return the process ids that had to be killed."""
    segments = _segments(members.alive())
    _signal(leaders, signal.SIGTERM)
    _signal(leaders, signal.SIGCONT)  # a stopped process hears nothing else
    deadline_s = time.monotonic() + grace_s
    left = _left(members, deadline_s)
    killed: list[int] = []
    if left:
        segments |= _segments(left)
        # A resource tracker unlinks the semaphores and the shared memory of the killed once they are gone.
        trackers = [pid for pid in left if _is_tracker(pid)]
        killed = [pid for pid in left if pid not in trackers]
        _signal(killed, signal.SIGKILL)
        left = _left(members, time.monotonic() + _TRACKER_GRACE_S)
        while left:
            _signal(left, signal.SIGKILL)
            left = _left(members, time.monotonic() + _TRACKER_GRACE_S)
    for name in segments:
        with suppress(OSError):
            Path(name).unlink()
    return killed


def await_reaped(members: Members, grace_s: float = REAPED_S) -> None:
    """Wait, at most `grace_s`, until who adopted the ended members has reaped them, so that no list shows any."""
    deadline_s = time.monotonic() + grace_s
    while members.zombies() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _left(members: Members, deadline_s: float) -> list[int]:
    """Wait until no member runs or the deadline passes; return those that still run."""
    left = members.alive()
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = members.alive()
    return left


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class _Status:
    """What /proc/PID/stat says."""

    state: str
    group: int
    started_ticks: int


def _status(pid: int) -> _Status | None:
    """Return the status of a process, None where there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold anything; the numbered fields begin behind the last bracket.
    fields = text.rpartition(")")[2].split()
    return _Status(fields[0], int(fields[2]), int(fields[19]))


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _segments(pids: list[int]) -> set[str]:
    """Return the shared memory files that the processes have mapped, spool files (which have folders) left out."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for line in (_PROC / str(pid) / "maps").read_text().splitlines():
                name = line[line.find("/") :] if "/" in line else ""
                if name.startswith(_SHM) and name.count("/") == _SHM.count("/"):
                    found.add(name)
    return found


def guard() -> None:
    """Wait for the lab to end or to be killed; in the second case end what it started.

    Lines on stdin: `group PID` for each server, `folder PATH` to be removed, `done` once all was taken down.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the lab by group would end its guard with it
    members, folders = Members(sys.argv[1]), []
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "group":
            members.add(int(value))
        elif word == "folder":
            folders.append(value)
        elif word == "done":
            return
    end(members, list(members.groups), GRACE_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    guard()
