"""`kvtrace upgrade`: a store of an older kvtrace brought to what this one reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtrace.analyze import analyze
from kvtrace.cli.signals import ended_in_order
from kvtrace.errors import in_one_line
from kvtrace.findings import table
from kvtrace.messages import say
from kvtrace.store.amounts import leave_out_impossible
from kvtrace.store.upgrade import is_current, upgrading
from kvtrace.wording import plural


@ended_in_order()
def command(
    store: Annotated[Path, typer.Argument(metavar="RUN.duckdb", help="A store that an older kvtrace wrote.")],
) -> None:
    """Bring a store of an older kvtrace to the present schema, in place.

    What was recorded stays as it is, but for amounts that nothing has; the answers are worked out again. The older file
    stays until the new one is whole.
    """
    if is_current(store):
        told = f"{store} is current: there is nothing to upgrade"
    else:
        with upgrading(store) as arriving:
            left_out = leave_out_impossible(arriving)
            requests = analyze(arriving)
            with arriving.transaction():
                table.write(arriving)
        told = f"{store} is upgraded: {plural(requests, 'request')} worked out again"
        if left_out:
            say(f"{store} {left_out}")
    sys.stdout.write(in_one_line(told) + "\n")
