"""Reads the registration that D's worker sends to P's workers in push mode."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def _decoder() -> Any:
    """Return a decoder that skips all fields but the two wanted: the list of blocks can be long."""
    import msgspec

    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [("request_id", str), ("decode_engine_id", str, "")]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Registration", fields))


def read_registration(payload: bytes) -> tuple[str, str] | None:
    """Return D's request id and D's engine id from a registration, None where it is none."""
    try:
        registration = _decoder().decode(payload)
    except ValueError:
        return None
    return registration.request_id, registration.decode_engine_id
