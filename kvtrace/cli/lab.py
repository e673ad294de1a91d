"""`kvtrace lab`: prefill engines, decode engines and a router on this machine, until interrupted."""

from __future__ import annotations

import json
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtrace import messages, modes
from kvtrace.emit import SPOOL_VARIABLE
from kvtrace.errors import LabError, UsageError
from kvtrace.lab.stack import START_TIMEOUT_S, Lab

if TYPE_CHECKING:
    from types import FrameType

_WATCH_S = 0.5


class Order(StrEnum):
    """The connector and the order of dispatch."""

    PUSH = modes.PUSH
    PULL = modes.PULL


def command(
    *,
    mode: Annotated[Order, typer.Argument(help="push: P writes into D. pull: D reads from P.")],
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines.")] = 1,
    stock: Annotated[bool, typer.Option("--stock", help="vLLM's own connectors, nothing recorded.")] = False,
    spool: Annotated[
        Path | None,
        typer.Option(
            envvar=SPOOL_VARIABLE, help="Folder for events; without it a temporary one that ends with the lab."
        ),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks of each engine.")] = 1,
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching", help="Let engines reuse KV of prompts.")] = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that an engine runs at once.")] = 16,
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="Memory for KV of each engine, GiB.")] = 1,
    engine_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="Further argument of vLLM's API server; may be repeated.")
    ] = None,
    verify_kv: Annotated[
        float,
        typer.Option(metavar="RATE", min=0, max=1, help="Part of the requests whose handed-over blocks are checked."),
    ] = 0.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that engines may take to start.")] = (
        START_TIMEOUT_S
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print what runs as one JSON object.")] = False,
) -> None:
    """Start a lab, print its addresses and exact commands, and take it down on Ctrl-C."""
    if stock and verify_kv:
        raise UsageError("--verify-kv needs the instrumented connectors, which --stock leaves out")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    lab = Lab(
        mode.value,
        prefill=prefill,
        decode=decode,
        instrumented=not stock,
        spool=spool,
        start_timeout_s=start_timeout,
        tensor_parallel_size=tensor_parallel_size,
        prefix_caching=prefix_caching,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        verify_kv=verify_kv,
        arguments=tuple(engine_arg or ()),
    )
    with lab:
        sys.stdout.write(json.dumps(_facts(lab)) + "\n" if as_json else _text(lab))
        sys.stdout.flush()
        try:
            _watch(lab)
        except KeyboardInterrupt:
            messages.write("taking the lab down\n")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does."""
    raise KeyboardInterrupt


def _watch(lab: Lab) -> None:
    """Say once of every program that it ended by itself; raise LabError when none is left."""
    told: set[str] = set()
    while True:
        time.sleep(_WATCH_S)
        ended = lab.failed()
        for name in sorted(set(ended) - told):
            messages.say(f"{name} ended by itself, its log in {lab.folder} says why; the rest goes on")
        told.update(ended)
        if len(ended) == len(lab.commands):
            raise LabError(f"nothing is left of the lab; its logs in {lab.folder} say why")


def _facts(lab: Lab) -> dict[str, Any]:
    """Return what runs, as plain values."""
    return {
        "mode": lab.mode,
        "url": lab.url,
        "model": lab.model,
        "model_dir": str(lab.model_dir),
        "spool": str(lab.spool) if lab.spool else None,
        "router": {"url": lab.url, "pid": lab.router.pid if lab.router else None},
        "engines": [
            {
                "name": engine.name,
                "role": engine.role.value,
                "url": engine.url,
                "engine_id": engine.engine_id,
                "side_channel_port": engine.side_channel_port,
                "pid": engine.pid,
                "log": str(engine.log),
            }
            for engine in lab.engines
        ],
        "commands": lab.commands,
    }


def _text(lab: Lab) -> str:
    """Return what runs, for people: addresses, then commands, then what to try."""
    lines = [f"{'router':<12}{lab.url}"]
    lines += [f"{engine.name:<12}{engine.url}" for engine in lab.engines]
    lines += [f"{'model':<12}{lab.model}  ({lab.model_dir})", f"{'logs':<12}{lab.folder}"]
    if lab.spool:
        lines.append(f"{'spool':<12}{lab.spool}")
    for name, line in lab.commands.items():
        lines += ["", f"# {name}", line]
    body = json.dumps({"model": lab.model, "prompt": "where did the time go", "max_tokens": 8})
    lines += ["", "# ask it", f"curl {lab.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"]
    if lab.spool:
        lines += ["", "# record it, from another terminal", f"kvtrace record -o lab.duckdb --spool {lab.spool}"]
    return "\n".join(lines) + "\n"
