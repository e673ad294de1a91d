"""What is too old leaves a store: events and everything that was made of them, whole windows at a time."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import schema

if TYPE_CHECKING:
    from kvtrace.store.connection import Store

_TIMES = {
    "event": "t_ns", "notable": "t_ns", "occurrence": "from_ns", "tally": "from_ns", "leg": "first_ns",
    "step": "coalesce(scheduled_ns, started_ns, ended_ns)",
    "transfer": "coalesce(post_started_ns, prepared_ns, done_ns)",
}  # fmt: skip


def forget_before(store: Store, before_ns: int) -> int:
    """Delete what happened before that time (unix ns) and requests that began before it; return how many requests."""
    keys = "SELECT request_key FROM request WHERE start_ns < $before"
    given = {"before": before_ns}
    count = int(store.select(f"SELECT count(*) FROM ({keys})", given).values[0][0])
    for table in schema.ANSWERS:
        store.execute(f"DELETE FROM {table} WHERE request_key IN ({keys})", given)
    for table, time in _TIMES.items():
        store.execute(f"DELETE FROM {table} WHERE {time} < $before", given)
    return count
