"""The signals by which a recording or a query is stopped."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[list[int]]:
    """Call `handler` on SIGINT and SIGTERM; yield the list of those seen."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        handler(number, frame)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal as Ctrl-C is handled. Raises KeyboardInterrupt."""
    raise KeyboardInterrupt


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM end a command as an error would, exit code 143: what is unfinished is then cleared away.

    Raises SystemExit where the signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Let SIGINT end the process as it ends one that handles no signals: a query of DuckDB need not hear of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
