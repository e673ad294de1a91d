"""`kvtrace router`: route requests to prefill and decode engines, by push or by pull."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtrace.router.config import EngineAddress, Mode, RouterConfig, TransferId
from kvtrace.router.server import serve

_ADDRESS = "URL[,engine_id=ID,host=HOST,port=PORT[,tp=N][,pp=N][,dcp=N]]"


def command(
    *,
    mode: Annotated[Mode, typer.Option(help="pull: P, then D with P's reply. push: both at once.")],
    prefill: Annotated[
        list[str],
        typer.Option(
            metavar=_ADDRESS,
            help="A prefill engine; may be repeated. The settings name its NIXL side channel, which push needs; "
            "without them the first request to it goes out in pull's order and its reply tells.",
        ),
    ],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="A decode engine; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    port_file: Annotated[
        Path | None, typer.Option(help="Write the port to this file, whole, once the router answers.")
    ] = None,
    transfer_id: Annotated[
        TransferId, typer.Option(help="Send a transfer_id in push; auto: if all engines are newer than vLLM 0.33.")
    ] = TransferId.AUTO,
    attempts: Annotated[
        int, typer.Option(min=1, help="Attempts per request; repeated only when an engine cannot be reached.")
    ] = 1,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections to each engine.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 32 << 20,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for requests in flight after SIGTERM or SIGINT.")] = 10.0,
) -> None:
    """Route OpenAI completions and chat to prefill (P) and decode (D) engines that hand KV over.

    With KVTRACE_SPOOL=DIR set, every request's points in the router are recorded there.
    """
    serve(
        RouterConfig(
            mode=mode,
            prefill=tuple(EngineAddress.parse(text) for text in prefill),
            decode=tuple(EngineAddress.parse(text) for text in decode),
            host=host,
            port=port,
            port_file=port_file,
            transfer_id=transfer_id,
            attempts=attempts,
            max_connections=max_connections,
            max_body_bytes=max_body_bytes,
            grace_s=grace,
        )
    )
