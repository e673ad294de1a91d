"""The server that profiles are sent to: what is an address of one, and whether anything answers there."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

from kvtrace.errors import UsageError

_CONNECT_WAIT_S = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def check_url(url: str) -> None:
    """Raise UsageError unless it is an address that profiles can be sent to."""
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0 and url.isprintable()
        )
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"profiles are sent to http://HOST:PORT or https://HOST, not to {url!r}")
    if parts.username is not None:
        raise UsageError(
            "the profiles' address must not hold a password, since the store keeps it: "
            "set PYROSCOPE_BASIC_AUTH_USER and PYROSCOPE_BASIC_AUTH_PASSWORD where engines start"
        )


def unreachable(url: str) -> str:
    """Return why nothing listens at an address, "" where something does or only a proxy can tell. Waits 3 s at most."""
    parts = urlsplit(url)
    if has_proxy():
        return ""
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname or ""
        # As bytes it needs no codec, whose import in a thread would be cut short in a child that is forked meanwhile.
        address: Any = (host.encode() if host.isascii() else host, port)
        socket.create_connection(address, _CONNECT_WAIT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    except (UnicodeError, LookupError) as error:
        return str(error)
    return ""


def has_proxy() -> bool:
    """Return whether the environment sends HTTP through a proxy."""
    return any(os.environ.get(name) for name in _PROXIES)
