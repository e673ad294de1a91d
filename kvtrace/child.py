"""The command that is recorded, as a child: started, waited for, its signals handed on, its exit code returned.

The child leads a process group of its own and, when stdin is the terminal that this process is in the
foreground of, owns that terminal until it ends. So Ctrl-C reaches the child's group once, from the terminal.
What is sent to this process instead is handed on once: SIGINT, SIGQUIT and SIGHUP to the whole group, as a
terminal does; SIGTERM to the child alone, as `kill` does, and then to what it leaves behind. A second SIGINT
becomes SIGTERM, a third SIGKILL for the group.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace.messages import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

_SETTLE_S = 5.0
_LOOK_S = 0.2
"""Python runs handlers between calls, so a signal that comes just before a wait begins is seen when that has ended."""
_TO_GROUP = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_HANDED_ON = (*_TO_GROUP, signal.SIGTERM)
_TERMINAL_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def run(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end and return its exit code: 128 + n for signal n, 127 not found, 126 not executable."""
    try:
        return _Child(argv, environment).wait()
    except FileNotFoundError:
        say(f"command not found: {argv[0]}")
        return 127
    except OSError as error:
        # A shell would read a script without such a line itself; the system does not.
        advice = "; a script needs a first line like #!/bin/sh" if error.errno == errno.ENOEXEC else ""
        say(f"cannot execute {argv[0]}: {error.strerror}{advice}")
        return 126


@dataclass(slots=True)
class _Child:
    """One run of a command: spawned as the leader of a group, waited for, its signals handed on."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    pid: int = 0
    ended: bool = False
    interrupts: int = 0
    terminated: bool = False
    terminal: _Terminal | None = None
    before: dict[int, Any] = field(default_factory=dict)

    def wait(self) -> int:
        """Return the exit code of the command, 128 + n for signal n. Raises OSError where it cannot be run."""
        self.terminal = _Terminal.of_stdin()
        # Where ends of children are ignored, as below some supervisors, the kernel keeps no exit code of them.
        self.before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
        try:
            # Python ignores SIGPIPE for itself, and the mask set here is not meant for the child.
            self.pid = os.posix_spawnp(
                self.argv[0],
                list(self.argv),
                self.environment,
                setpgroup=0,
                setsigmask=mask,
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            )
            # After the spawn, so that the child inherits what was ignored and not what is handled here.
            self.before |= {number: signal.signal(number, self._hand_on) for number in _HANDED_ON}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            try:
                status = self._reap()
            finally:
                self.ended = True
                if self.terminal:
                    self.terminal.take(self.pid)
            if self.terminated:
                self._signal_group(signal.SIGTERM)
            self._settle()
        finally:
            for number, handler in self.before.items():
                signal.signal(number, handler)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _reap(self) -> int:
        """Return the wait status of the ended child; where a terminal stops it, stop and go on with it."""
        if self.terminal is None:
            return self._changed(0)
        self.terminal.give(self.pid)
        while True:
            status = self._changed(os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                return status
            if os.WSTOPSIG(status) in _TERMINAL_STOPS:
                if os.WSTOPSIG(status) == signal.SIGTSTP or not self.terminal.is_ours():
                    self.terminal.take(self.pid)
                    os.kill(0, signal.SIGSTOP)
                self.terminal.give(self.pid)
                self._signal_group(signal.SIGCONT)

    def _changed(self, options: int) -> int:
        """Return the child's wait status once it has one; at once where it ends, else within `_LOOK_S`."""
        ends: list[int] = []
        with suppress(OSError):  # old kernels, and containers that forbid it: then every end is seen that late
            ends.append(os.pidfd_open(self.pid))
        try:
            while True:
                found, status = os.waitpid(self.pid, options | os.WNOHANG)
                if found:
                    return status
                select.select(ends, [], [], _LOOK_S)
        finally:
            for descriptor in ends:
                os.close(descriptor)

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal that was sent to this process on to the child, more firmly when it is repeated.

        Once that has ended, what it left running gets it.
        """
        if number == signal.SIGINT:
            self.interrupts += 1
            number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(self.interrupts, 3) - 1]
        if number == signal.SIGTERM and not self.ended:
            self.terminated = True
            with suppress(ProcessLookupError, PermissionError):  # sudo's child is another user's
                os.kill(self.pid, number)
        else:
            self._signal_group(number)

    def _signal_group(self, number: int) -> bool:
        """Signal everything that is left of the child's group; return False where nothing is."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _settle(self) -> None:
        """Give what the command left running a moment to end, so that its last events are there to be stored."""
        deadline_s = time.monotonic() + _SETTLE_S
        while self._signal_group(0) and _runs(self.pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)


def _runs(group: int) -> bool:
    """Return True while a process of the group runs; one that has ended and waits to be reaped does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # The name in brackets may hold anything; state, parent and group follow the last bracket.
            state, _, member_of = path.read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in {"Z", "X"}:
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Terminal:
    """The terminal that stdin is, which one process group at a time reads from and is interrupted by."""

    descriptor: int

    @classmethod
    def of_stdin(cls) -> _Terminal | None:
        """Return the terminal where stdin is this process's own, else None."""
        try:
            os.tcgetpgrp(0)
        except OSError:
            return None
        return cls(0)

    def is_ours(self) -> bool:
        """Return True while this process's group is the one in the foreground."""
        with suppress(OSError):
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        return False

    def give(self, group: int) -> None:
        """Put another group into the foreground, if this one is there."""
        if self.is_ours():
            self._set(group)

    def take(self, group: int) -> None:
        """Come back into the foreground, if `group` is there."""
        with suppress(OSError):
            if os.tcgetpgrp(self.descriptor) == group:
                self._set(os.getpgrp())

    def _set(self, group: int) -> None:
        # A background process that sets the foreground group would be stopped by SIGTTOU.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
        with suppress(OSError):
            os.tcsetpgrp(self.descriptor, group)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
