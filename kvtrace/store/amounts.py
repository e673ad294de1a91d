"""Events of amounts that nothing has, in a store of an older kvtrace, which took them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace.schema.amounts import impossible
from kvtrace.wording import plural

if TYPE_CHECKING:
    from kvtrace.store.connection import Store


def count_impossible(store: Store) -> int:
    """Return how many events hold an amount that nothing has."""
    return int(store.select(f"SELECT count(*) FROM event WHERE {impossible()}").values[0][0])  # noqa: S608 -- names of ours


def leave_out_impossible(store: Store) -> str:
    """Take such events out of a store that is open for writing; return what is said of it then, "" without any."""
    count = count_impossible(store)
    if not count:
        return ""
    store.execute(f"DELETE FROM event WHERE {impossible()}")  # noqa: S608 -- the same
    return (
        f"held amounts that nothing has, in {plural(count, 'event')}, which {'was' if count == 1 else 'were'} left out"
    )
