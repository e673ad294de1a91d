"""Stores that several tests begin with, made once in a process and copied: a copy costs a hundredth of the making."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

_KEPT = 32
"""So many, those that were used last: tests that begin with the same store stand beside each other."""

_MOULDS: dict[Hashable, bytes] = {}


def cast(path: Path, what: Hashable, make: Callable[[Path], object]) -> Path:
    """Write the store at `path` that `make` writes, made by it only where `what` has not been made yet; return `path`.

    `what` has to tell everything that the store's rows depend on.
    """
    content = _MOULDS.pop(what, None)
    if content is None:
        make(path)
        content = path.read_bytes()
    else:
        path.write_bytes(content)
    _MOULDS[what] = content
    if len(_MOULDS) > _KEPT:
        del _MOULDS[next(iter(_MOULDS))]
    return path
