"""Waiting in tests: for what is to happen, and never for a time that is hoped to be long enough."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = 120.0
"""More than anything takes here, also where the machine is three times as slow or stands still for seconds."""


def until(condition: Callable[[], object], timeout_s: float = LONG_S, what: str = "the condition") -> None:
    """Return once the condition holds; raise AssertionError where it does not within the time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s until {what}"
        time.sleep(0.02)
