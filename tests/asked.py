"""What named queries answer of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrace import queries
from kvtrace.store import Store, identity

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrace.store.revision import Identity

_reader: tuple[Path, Identity, Store] | None = None


def ask(path: Path, name: str, **given: object) -> list[dict[str, Any]]:
    """Return the rows of a named query, its parameters given as they are on a command line."""
    query = queries.load(name)
    return _opened(path).rows(query.sql, query.bind({key: str(value) for key, value in given.items()}))


def leave() -> None:
    """Close the store that was asked last, for those who write to it next."""
    global _reader  # noqa: PLW0603 -- one is open at a time
    if _reader is not None:
        _reader[2].close()
        _reader = None


def _opened(path: Path) -> Store:
    """Return the store at `path`, which stays open until another one is asked: opening takes longer than answering."""
    global _reader  # noqa: PLW0603 -- one is open at a time
    now = identity(path)
    if _reader is not None:
        known, seen, store = _reader
        if (known, seen) == (path, now):
            return store
        store.close()
    store = Store.open(path)
    _reader = path, now, store
    return store
