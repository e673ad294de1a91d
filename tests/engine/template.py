"""Engines under test forked from one process that has imported vLLM, so that each API server need not: 13 s of a core.

What runs is vLLM's own server with its own arguments, environment and process group; only its imports have been made
before. `tests/engine/test_record_command.py` and `make demo` start vLLM as its users do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any

import pytest

from kvtrace.lab import program
from tests.engine import programs, sites, template_process

SERVER = ("-m", template_process.MODULES[0])
MAY_DIFFER = ("KVTRACE_", "VLLM_NIXL_SIDE_CHANNEL_", "OTEL_", "PYTEST_", "PYTHONPATH", "TMPDIR")
"""Variables so named are read when they are needed. Others may have been read by imports, and are the same for all."""


class Forked:
    """A forked server, used as `subprocess.Popen` is."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        """Return the exit code (-n for signal n), None while it runs."""
        if self.returncode is None:
            try:
                self.returncode = self._template.ask({"poll": self.pid})
            except OSError:  # the process has ended before its children
                self.returncode = None if programs.alive([self.pid]) else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raise TimeoutExpired after some seconds, if these are given."""
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that has imported vLLM: started with the first server, with that server's environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._loaded: dict[str, str] = {}
        self._number = 0

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **options: Any) -> Any:
        """Return a server, forked if it is an engine that may fork, else started as `subprocess.Popen` does."""
        if not self._serves(command, env):
            return subprocess.Popen(command, env=env, stdout=stdout, **options)
        asked = {"start": list(command), "env": dict(env), "cwd": os.getcwd()}
        return Forked(self, self.ask(asked, stdout.fileno()))

    def ask(self, request: dict[str, Any], *descriptors: int) -> Any:
        """Return the process's answer; raise OSError where it has ended."""
        with self._lock:
            if self._channel is None:
                raise BrokenPipeError
            self._number += 1
            packet = json.dumps(request | {"number": self._number}).encode()
            socket.send_fds(self._channel, [packet], descriptors)
            number = 0
            while number != self._number:  # what was answered to somebody who was interrupted comes first
                packet = self._channel.recv(template_process.PACKET_BYTES)
                if not packet:
                    raise BrokenPipeError
                number, answer = json.loads(packet)
            return answer

    def close(self) -> None:
        """End the process."""
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._channel = None
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _serves(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether such a server can be forked, after starting the process if need be."""
        loaded = {name: value for name, value in env.items() if not name.startswith(MAY_DIFFER)}
        may_fork = sites.paths("start_site") in env.get("PYTHONPATH", "").split(os.pathsep)
        if (command[0], *command[1:3]) != (sys.executable, *SERVER) or not may_fork:
            return False
        if self._process is None:
            self._start(loaded)
        return loaded == self._loaded

    def _start(self, loaded: dict[str, str]) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loaded = loaded
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", template_process.__file__, str(other.fileno())],
                env={**loaded, "PYTHONPATH": sites.paths("start_site")},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,  # it ends behind the labs, also where somebody interrupts the tests
            )


@contextmanager
def forking() -> Iterator[None]:
    """Let labs fork their engines while the block runs."""
    template = Template()
    as_it_is = SimpleNamespace(Popen=template.popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "subprocess", as_it_is)
        try:
            yield
        finally:
            template.close()
