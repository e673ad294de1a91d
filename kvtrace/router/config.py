"""What a router is told: its engines, its order of dispatch, its limits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from kvtrace import modes
from kvtrace.errors import KvtraceError, UsageError

_PORT_MAX = 65_535


class Mode(StrEnum):
    """The order of dispatch: pull sends P's leg and then D's, push sends both at once."""

    PULL = modes.PULL
    PUSH = modes.PUSH


class TransferId(StrEnum):
    """Whether both legs of a push carry a `transfer_id`; auto asks the engines for their release."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a P's NIXL side channel is, as D has to be told in push."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1

    def params(self) -> dict[str, object]:
        """Return them under vLLM's names, for D's kv_transfer_params."""
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "dcp_size": self.dcp_size,
        }


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine's HTTP address and, for a P whose side channel is known beforehand, its coordinates."""

    url: str
    coordinates: Coordinates | None = None

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Return the address written as `URL[,engine_id=ID,host=HOST,port=PORT[,tp=N][,pp=N][,dcp=N]]`."""
        url, *settings = [part.strip() for part in text.split(",")]
        if "://" not in url:
            url = f"http://{url}"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or parts.query or parts.fragment:
            raise UsageError(f"{text!r} is no engine address; write http://HOST:PORT")
        if "@" in parts.netloc:
            # Addresses are stored, and told to clients whose request got lost.
            raise UsageError("an engine address may bear no password: send it as the header Authorization")
        return cls(url.rstrip("/"), _coordinates(text, settings))


def _coordinates(text: str, settings: list[str]) -> Coordinates | None:
    if not settings:
        return None
    given = dict(setting.partition("=")[::2] for setting in settings)
    unknown = sorted(given.keys() - {"engine_id", "host", "port", "tp", "pp", "dcp"})
    missing = sorted({"engine_id", "host", "port"} - {name for name, value in given.items() if value})
    if unknown or missing:
        wrong = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise UsageError(f"{text!r} ({wrong}); write URL,engine_id=ID,host=HOST,port=PORT[,tp=N][,pp=N][,dcp=N]")
    try:
        port, *sizes = (int(given.get(name, "1")) for name in ("port", "tp", "pp", "dcp"))
    except ValueError as error:
        raise UsageError(f"{text!r}: port, tp, pp and dcp are whole numbers") from error
    if not 0 < port <= _PORT_MAX or min(sizes) < 1:
        raise UsageError(f"{text!r}: port is 1 to {_PORT_MAX}, and tp, pp and dcp are whole numbers from 1 on")
    return Coordinates(given["engine_id"], given["host"], port, *sizes)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything a router needs to know before it starts."""

    mode: Mode
    prefill: tuple[EngineAddress, ...]
    decode: tuple[EngineAddress, ...]
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    port_file: Path | None = None
    """File that gets the bound port, whole or not at all, once the router answers."""
    transfer_id: TransferId = TransferId.AUTO
    attempts: int = 1
    """Attempts per request; another one is made only when an engine could not be reached at all."""
    max_connections: int = 1024
    """Connections to each engine; further requests wait for one."""
    max_body_bytes: int = 32 << 20
    """Largest request body, and largest reply of P."""
    keepalive_s: float = 3.0
    """How long an idle connection to an engine is kept; vLLM itself closes them after 5 s."""
    connect_timeout_s: float = 10.0
    grace_s: float = 10.0
    """How long requests in flight may go on after a signal to stop."""

    def __post_init__(self) -> None:
        if not self.prefill or not self.decode:
            raise UsageError("a router needs at least one prefill and one decode engine")
        if self.attempts < 1 or self.max_connections < 1 or self.max_body_bytes < 1:
            raise UsageError("attempts, connections and body bytes are at least 1")
        if not 0 <= self.grace_s < math.inf:
            raise UsageError("the grace is a number of seconds, which ends")
        if self.port_file is not None and not os.access(self.port_file.parent, os.W_OK):
            raise KvtraceError(f"{self.port_file} cannot be written: name a file in a folder that is there and yours")
