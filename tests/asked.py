"""What named queries answer of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrace import queries
from kvtrace.store import Store

if TYPE_CHECKING:
    from pathlib import Path


def ask(path: Path, name: str, **given: object) -> list[dict[str, Any]]:
    """Return the rows of a named query, its parameters given as they are on a command line."""
    with Store.open(path) as store:
        query = queries.load(name)
        return store.rows(query.sql, query.bind({key: str(value) for key, value in given.items()}))
