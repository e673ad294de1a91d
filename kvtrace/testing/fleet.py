"""A fleet to be made up: how many requests, how they are handed over, on how many engines; and its store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from kvtrace.errors import UsageError

if TYPE_CHECKING:
    from kvtrace.store import Store

ROUTER = 1
_PER_ENGINE = 2  # the core, which is its worker too, and the API server that started it


@dataclass(frozen=True, slots=True)
class Fleet:
    """A deployment and its traffic. The same values give the same events, nanosecond by nanosecond.

    `push_share` of the requests are handed over by push, the others by pull; `odd_share` of them go wrong in one of
    the ways of `ODDITIES`. With `http` the engines' HTTP servers are instrumented too.
    """

    requests: int
    seed: int = 0
    push_share: float = 0.5
    odd_share: float = 0.05
    pairs: int = 4
    per_s: float = 800.0
    http: bool = False
    start_ns: int = 1_700_000_000_000_000_000

    def __post_init__(self) -> None:
        """Raise UsageError for a fleet that cannot be."""
        wrong = (
            ("requests", self.requests < 0, "0 or more"),
            ("pairs", self.pairs < 1, "1 or more"),
            ("per_s", not self.per_s > 0, "more than 0"),
            ("push_share", not 0 <= self.push_share <= 1, "0 to 1"),
            ("odd_share", not 0 <= self.odd_share <= 1, "0 to 1"),
        )
        for name, is_wrong, wanted in wrong:
            if is_wrong:
                raise UsageError(f"a fleet's {name} is {wanted}, not {getattr(self, name)}")

    def prefill(self, pair: int) -> int:
        """Return the number of the process that is P of that pair."""
        return ROUTER + 1 + _PER_ENGINE * pair

    def decode(self, pair: int) -> int:
        """Return the number of the process that is D of that pair."""
        return ROUTER + 1 + _PER_ENGINE * (self.pairs + pair)


def processes(fleet: Fleet) -> pa.Table:
    """Return the rows of table `process`: a router, and two processes an engine."""
    rows = [_row(ROUTER, 0, {"kind": "router"})]
    for side, number_of in (("p", fleet.prefill), ("d", fleet.decode)):
        for pair in range(fleet.pairs):
            number = number_of(pair)
            facts = {"kind": "core", "engine_id": f"{side}{pair}", "tp_size": "1"}
            rows += [_row(number, 1000 + number + 1, facts), _row(number + 1, 0, {"kind": "api"})]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


_SCHEMA = pa.schema(
    [
        ("process", pa.int32()), ("series", pa.string()), ("host", pa.string()), ("domain", pa.string()),
        ("pid", pa.int64()), ("parent_pid", pa.int64()), ("started_ns", pa.int64()), ("offset_ns", pa.int64()),
        ("lost_records", pa.int64()), ("facts", pa.map_(pa.string(), pa.string())),
    ]
)  # fmt: skip


def _row(number: int, parent: int, facts: dict[str, str]) -> dict[str, object]:
    return {
        "process": number, "series": f"s{number}", "host": "host-a", "domain": "boot-1", "pid": 1000 + number,
        "parent_pid": parent, "started_ns": 0, "offset_ns": 0, "lost_records": 0, "facts": list(facts.items()),
    }  # fmt: skip


def fill(store: Store, fleet: Fleet) -> int:
    """Append the fleet's processes and events to a store, oldest first; return how many events those are."""
    from kvtrace.testing.traffic import batches

    store.append("process", processes(fleet))
    count = 0
    for batch in batches(fleet):
        store.append("event", batch)
        count += batch.num_rows
    return count
