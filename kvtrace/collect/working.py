"""The working file of a recording: opened for writing, made anew, or rebuilt where a crash has torn it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from kvtrace.errors import DamageError
from kvtrace.store import Store, working_path
from kvtrace.store.amounts import leave_out_impossible

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def opened(output: Path, notice: Callable[[str, str], None]) -> Store:
    """Return the working file beside `output`, open for writing, without amounts that nothing has, and say of such.

    What was torn is kept under another name, and said. The last snapshot takes its place: the spool still has what
    that lacks. Of an event left out now the answers, should there be any, stay as they are.
    """
    store = _whole(output, notice)
    try:
        if left_out := leave_out_impossible(store):
            notice(str(output), left_out)
    except BaseException:
        store.close()
        raise
    return store


def _whole(output: Path, notice: Callable[[str, str], None]) -> Store:
    working = working_path(output)
    try:
        return Store.open(working, "write")
    except DamageError as error:
        broken = working.with_name(working.name + ".broken")
        working.replace(broken)
        working.with_name(working.name + ".wal").unlink(missing_ok=True)
        if output.exists():
            shutil.copyfile(output, working)
        notice(str(broken), f"{error}; rebuilt from the last snapshot and the spool, which lack nothing")
        return Store.open(working, "write")
