"""Free loopback ports."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from kvtrace.errors import LabError

HOST = "127.0.0.1"
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
_TRIES = 500
_taken: set[int] = set()


def take(span: int = 1) -> int:
    """Return the first of `span` neighbouring ports that are free now and that this process has not handed out.

    They lie below the range from which the kernel serves outgoing connections, since an engine binds its ports
    many seconds after it was told them, and a connection made meanwhile would have taken one.
    """
    ceiling = _ephemeral_lowest()
    for _ in range(_TRIES):
        first = _LOWEST + secrets.randbelow(max(1, ceiling - _LOWEST - span))
        wanted = range(first, first + span)
        if _taken.isdisjoint(wanted) and all(_is_free(port) for port in wanted):
            _taken.update(wanted)
            return first
    raise LabError(f"no {span} neighbouring free ports on {HOST} between {_LOWEST} and {ceiling}; end other servers")


def give_back(first: int, span: int = 1) -> None:
    """Let ports be handed out again."""
    _taken.difference_update(range(first, first + span))


def _ephemeral_lowest() -> int:
    """Return the lowest port that the kernel takes for outgoing connections."""
    try:
        lowest = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
    return lowest if lowest > _LOWEST + 1000 else 65_000


def _is_free(port: int) -> bool:
    """Return whether the port can be listened on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
