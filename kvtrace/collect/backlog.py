"""What of a recording has not been analysed: since when, and what the store says of it for whoever goes on with it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtrace.store import Store

OWED = "recorder.unanalyzed_from_ns"
"""The run's fact that says since when committed events are not analysed, unix ns; none says that all are."""
RESUME_MARGIN_NS = 60_000_000_000


class Backlog:
    """Events that have not been analysed: `since_ns` is the time of the first one, unix ns, None where all have been.

    What comes while an analysis is under way is left for the next one. The store owes both until it is done.
    """

    def __init__(self) -> None:
        self.since_ns: int | None = None
        self._said_ns: int | None = None

    def resume(self, store: Store, known: Mapping[str, str]) -> None:
        """Begin with what an interrupted recording has perhaps not analysed, by its facts, and write so.

        That is what was committed after the last snapshot, or what was said to be owed: a backlog is older than that.
        """
        said = [known[name] for name in ("recorder.published_ns", OWED) if known.get(name, "").isdecimal()]
        self.since_ns = self._said_ns = max(0, min(map(int, said), default=0) - RESUME_MARGIN_NS)
        store.remember({OWED: str(self.since_ns)})

    def owe(self, store: Store, oldest_ns: int | None) -> None:
        """Write that events are owed, the oldest of that time; in the transaction that brings them."""
        owed_ns = _earlier(oldest_ns, self._said_ns)
        if owed_ns != self._said_ns:
            store.remember({OWED: str(owed_ns)})

    def came(self, oldest_ns: int | None) -> None:
        """Take in that such events were committed."""
        self._said_ns = _earlier(oldest_ns, self._said_ns)
        self.since_ns = _earlier(oldest_ns, self.since_ns)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Take what there is as being analysed in the block; after an exception it is left again."""
        begun_ns, self.since_ns = self.since_ns, None
        try:
            yield
        except BaseException:
            self.since_ns = _earlier(begun_ns, self.since_ns)
            raise
        self._said_ns = self.since_ns

    def settle(self, store: Store) -> None:
        """Write that only what came meanwhile is owed; in the transaction that brings the answers."""
        if self.since_ns is None:
            store.execute("DELETE FROM run WHERE name = $owed", {"owed": OWED})
        else:
            store.remember({OWED: str(self.since_ns)})


def _earlier(one: int | None, other: int | None) -> int | None:
    """Return the earlier of two times, None only if both are."""
    return min((t_ns for t_ns in (one, other) if t_ns is not None), default=None)
