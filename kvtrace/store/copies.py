"""Copies of a store that a recorder puts in place for Grafana, known by what they say of themselves."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.errors import StoreError
from kvtrace.store import opening
from kvtrace.store.files import copy_through

if TYPE_CHECKING:
    from collections.abc import Iterable

_FACT = "recorder.copies"


def fact(targets: Iterable[Path]) -> dict[str, str]:
    """Return the run's fact that names where copies are put: a copy holds what its store holds, so it names itself."""
    names = "\n".join(map(_named, targets))
    return {_FACT: names} if names else {}


def is_copy(path: Path) -> bool:
    """Return whether the store at `path` was put there as a copy of another one; False for whatever cannot be read."""
    with contextlib.suppress(StoreError, OSError):
        return _names_itself(path, path)
    # A copy's reader may have it open for writing, and DuckDB then lets nobody else in; its bytes can be read.
    with contextlib.suppress(StoreError, OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        passing = Path(folder) / "passing.duckdb"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            copy_through(descriptor, passing)
        finally:
            os.close(descriptor)
        return _names_itself(passing, path)
    return False


def _names_itself(file: Path, path: Path) -> bool:
    return _named(path) in opening.facts(file).get(_FACT, "").splitlines()


def _named(path: Path) -> str:
    """Return a path as the fact has it: the name's own, since a copy takes the place of a link, not of its target."""
    return str(path.parent.resolve() / path.name)
