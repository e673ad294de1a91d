"""`kvtrace import`: records of load generators, routers and connectors' logs into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtrace.cli.signals import ended_in_order
from kvtrace.errors import UsageError
from kvtrace.messages import command_line, say


@ended_in_order()
def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files to import, all of them or none.")],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="RUN.duckdb", help="Add to this store.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN.duckdb", help="Make this store.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With -o: overwrite the store if it exists.")] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="vllm-lifecycle, aiperf, vllm-bench or dynamo; without it a file's content tells.",
            show_default=False,
        ),
    ] = None,
    same_host: Annotated[
        bool, typer.Option("--same-host", help="The files are of the host whose processes the store recorded.")
    ] = False,
) -> None:
    """Import records of other tools: what a client saw, what a router or a connector logged.

    Formats: the lifecycle log lines of vLLM's KV connectors, AIPerf's profile_export.jsonl, the JSON of
    `vllm bench serve --save-result --save-detailed`, Dynamo's request trace.
    """
    if (into is None) == (output is None):
        raise UsageError("name the store: --into RUN.duckdb to add to it, or -o RUN.duckdb to make it")
    if force and output is None:
        raise UsageError("--force goes with -o; --into never overwrites what is there")
    from kvtrace.importers.intake import import_files

    outcome = import_files(files, into, output, force=force, forced=form, same_host=same_host)
    for name, sentence in outcome.said:
        say(f"{name}: {sentence}")
    if not outcome.points:
        say("nothing is new" + (f"; {into} is as it was" if into is not None else ""))
        return
    say(f"next: {command_line('explain', *(store for store in (into, output) if store))}")
