"""Running the router: a socket of its own, signals, a last grace."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from kvtrace import emit, messages, profiler
from kvtrace.errors import KvtraceError
from kvtrace.router.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtrace.router.config import RouterConfig

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than usual clients keep idle connections, so that they close first


def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish for up to `config.grace_s`."""
    profiler.start({"role": "router", "process": "router"}, emit.tracer())
    listener = _bind(config.host, config.port)
    settings = uvicorn.Config(
        create_app(config),
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="on",
        ws="none",  # a POST that asks for a WebSocket would be left without an answer
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.grace_s)),
    )
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_Server(settings, lambda: _announce(config, listener)).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """uvicorn's server that says when it answers, and ends with exit code 0 when asked to end."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then announce it."""
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into an orderly end, a second one into a quick one."""
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGTERM, signal.SIGINT)
        for number in wanted:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in wanted:
                loop.remove_signal_handler(number)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise KvtraceError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0 takes a free one)"
        ) from error
    return listener


def _announce(config: RouterConfig, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    if config.port_file is not None:
        _write_whole(config.port_file, f"{port}\n")
    messages.write(f"kvtrace router: {config.mode.value} at http://{host}:{port}\n")


def _write_whole(path: Path, text: str) -> None:
    """Write the file so that a reader sees all of it or none."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
