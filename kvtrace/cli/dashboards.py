"""`kvtrace dashboards`: put Grafana's dashboards, alert rules and provisioning files into a folder."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvtrace.dashboards import files
from kvtrace.errors import ExportError
from kvtrace.messages import command_line


class Action(StrEnum):
    """What to do with the dashboards."""

    WRITE = "write"


def command(
    action: Annotated[Action, typer.Argument(help="write: put all files into FOLDER.", show_choices=True)],
    folder: Annotated[Path, typer.Argument(help="Where to.", metavar="FOLDER")],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file is missing or not what would be written.")
    ] = False,
) -> None:
    """Put Grafana's dashboards, alert rules, provisioning and compose files into a folder; its README says how on."""
    assert action is Action.WRITE  # noqa: S101 -- there is no other yet
    if check:
        if stale := files.stale(folder):
            names = ", ".join(str(path) for path in stale)
            raise ExportError(
                f"not as generated: {names}; `{command_line('dashboards', 'write', folder)}` brings them along"
            )
        return
    for path in files.write(folder):
        sys.stdout.write(f"{path}\n")
