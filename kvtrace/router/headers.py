"""Which headers travel on, and which belong to one hop only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]
LegHeaders = list[tuple[str, str]]

_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Written anew for each leg. Replies must come unencoded, since first content is looked for in them.
_OWN_TO_ENGINE = frozenset(
    {b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id", b"traceparent", b"tracestate"}
)
_OWN_TO_CLIENT = frozenset({b"date", b"server", b"x-request-id", b"x-kvtrace-request-id"})
_CONTROLS = frozenset(range(0x20)) - {0x09} | {0x7F}


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return the values of the header `name` (lower case), in order."""
    return [value for key, value in headers if key.lower() == name]


def to_engine(headers: Iterable[tuple[bytes, bytes]]) -> LegHeaders:
    """Return the client's headers that travel on to an engine; those that cannot be written cleanly are left out."""
    kept: LegHeaders = []
    for key, value in _end_to_end(headers, _OWN_TO_ENGINE):
        if _CONTROLS.isdisjoint(value):
            try:
                kept.append((key.decode("ascii"), value.decode()))
            except UnicodeDecodeError:
                continue
    return kept


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return an engine's headers that travel on to the client, names in lower case; those that HTTP forbids do not."""
    return [(key, value) for key, value in _end_to_end(headers, _OWN_TO_CLIENT) if _CONTROLS.isdisjoint(value)]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], own: frozenset[bytes]) -> Iterable[tuple[bytes, bytes]]:
    lowered = [(key.lower(), value) for key, value in headers]
    named = {name.strip().lower() for value in values(lowered, b"connection") for name in value.split(b",")}
    return [(key, value) for key, value in lowered if key not in _HOP and key not in own and key not in named]
