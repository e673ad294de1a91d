"""The signals by which a recording or a query is stopped."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack, contextmanager
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


class Stop:
    """Whether SIGINT or SIGTERM has asked for the end, where it `listens` to them. Use as a context manager.

    Opening a store takes a second, so it is entered before: a recording that is stopped early ends as any other.
    """

    def __init__(self, *, listens: bool) -> None:
        self._listens = listens
        self._asked = threading.Event()
        self._handled = ExitStack()

    def __enter__(self) -> Stop:
        """Take the signals for a wish to end in order."""
        if self._listens:
            self._handled.enter_context(stop_signals(lambda *_: self._asked.set()))
        return self

    def __exit__(self, *_exception: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Let further signals do what they did before."""
        self._handled.close()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the end was asked for, as soon as it is, at the latest after `timeout_s` seconds."""
        return self._asked.wait(timeout_s)


def raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal as Ctrl-C is handled. Raises KeyboardInterrupt."""
    raise KeyboardInterrupt


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM end a command as an error would, exit code 143: what is unfinished is then cleared away.

    Raises SystemExit where the signal arrives. Where it is ignored it stays so, for what is started below too.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
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
