"""Stores that several tests begin with, made once in a process and copied: a copy costs a hundredth of the making."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

_MOULDS: dict[Hashable, bytes] = {}


def cast(path: Path, what: Hashable, make: Callable[[Path], object]) -> Path:
    """Write the store at `path` that `make` writes, made by it only where `what` has not been made yet; return `path`.

    `what` has to tell everything that the store's rows depend on.
    """
    if what in _MOULDS:
        path.write_bytes(_MOULDS[what])
    else:
        make(path)
        _MOULDS[what] = path.read_bytes()
    return path
