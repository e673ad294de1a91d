"""What is too old leaves a store: events and everything that was made of them, whole windows at a time."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import schema
from kvtrace.legs import base_ids
from kvtrace.schema.kept import WINDOWS_NS

if TYPE_CHECKING:
    from kvtrace.store.connection import Store

_TIMES = {
    "event": "t_ns", "notable": "t_ns", "occurrence": "from_ns", "tally": "from_ns", "leg": "first_ns",
    "step": "coalesce(scheduled_ns, started_ns, ended_ns)",
    "transfer": "coalesce(post_started_ns, prepared_ns, done_ns)",
}  # fmt: skip
# What is left of a request that goes would be taken for one of which the beginning was lost.
_OF_REQUESTS = ("event", "notable", "leg", "transfer")
_AFTER_NS = 600_000_000_000  # what it did so long after the rest is not looked for
_COUNTED_LESS = f"""
UPDATE occurrence SET events = occurrence.events - gone.events FROM (
  SELECT t_ns // {WINDOWS_NS[0]} * {WINDOWS_NS[0]} AS from_ns, process, stage, count(*) AS events
  FROM event WHERE t_ns >= $before AND t_ns < $after AND request IN (SELECT unnest($names)) GROUP BY ALL
) AS gone
WHERE gone.from_ns = occurrence.from_ns AND gone.process = occurrence.process AND gone.stage = occurrence.stage
"""


def forget_before(store: Store, before_ns: int) -> int:
    """Delete what happened before that time (unix ns) and requests that began before it; return how many requests."""
    keys = "SELECT request_key FROM request WHERE start_ns < $before"
    given = {"before": before_ns}
    count = int(store.select(f"SELECT count(*) FROM ({keys})", given).values[0][0])
    if names := _names_after(store, before_ns):
        span = {"before": before_ns, "after": before_ns + _AFTER_NS, "names": names}
        store.execute(_COUNTED_LESS, span)
        for table in _OF_REQUESTS:
            within = f"{_TIMES[table]} >= $before AND {_TIMES[table]} < $after"
            store.execute(f"DELETE FROM {table} WHERE {within} AND request IN (SELECT unnest($names))", span)
    for table in schema.ANSWERS:
        store.execute(f"DELETE FROM {table} WHERE request_key IN ({keys})", given)
    for table, time in _TIMES.items():
        store.execute(f"DELETE FROM {table} WHERE {time} < $before", given)
    return count


def _names_after(store: Store, before_ns: int) -> list[str]:
    """Return the ids under which requests that began before that time go on after it, and no later request does."""
    rows = store.rows(
        "SELECT request_id, start_ns >= $before AS is_kept FROM request "
        "WHERE coalesce(end_ns, start_ns) >= $back AND start_ns < $after",
        {"before": before_ns, "back": before_ns - _AFTER_NS, "after": before_ns + _AFTER_NS},
    )
    bases: dict[bool, set[str]] = {False: set(), True: set()}
    for row in rows:
        bases[row["is_kept"]].update(base_ids(row["request_id"]))
    going = bases[False] - bases[True]
    known = store.rows(
        "SELECT DISTINCT request FROM event WHERE t_ns >= $before AND t_ns < $after AND request <> ''",
        {"before": before_ns, "after": before_ns + _AFTER_NS},
    )
    return [row["request"] for row in known if not going.isdisjoint(base_ids(row["request"]))]
