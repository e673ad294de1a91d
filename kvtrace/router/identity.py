"""The ids of a request: one minted per attempt, and the client's own, kept as an alias.

vLLM's push matches the two legs by request id alone, so an id that two requests in flight share could hand one the
other's KV. Engines therefore only ever see minted ids; a client's id may repeat, and may be anything.
"""

from __future__ import annotations

import secrets

from kvtrace.router.headers import Headers, values

HEADER = b"x-request-id"
MINTED_HEADER = b"x-kvtrace-request-id"
_ALIAS_LENGTH_MAX = 256


def mint() -> str:
    """Return a new id, unique for practical purposes: `kvt-` and 32 hexadecimal digits."""
    return f"kvt-{secrets.token_hex(16)}"


def alias(headers: Headers) -> str:
    """Return the client's own id, fit for a store and for a header: printable, at most 256 characters; "" if none."""
    sent = next(iter(values(headers, HEADER)), b"")
    try:
        text = sent.decode()
    except UnicodeDecodeError:
        text = sent.decode("latin-1")
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_ALIAS_LENGTH_MAX]).strip()


def reply_headers(minted: str, client: str) -> Headers:
    """Return the headers that tell the client both ids: its own where it sent one, and the minted one."""
    return [(HEADER, (client or minted).encode()), (MINTED_HEADER, minted.encode())]
