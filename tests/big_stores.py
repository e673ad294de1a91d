"""Stores as large as wanted for benchmarks: one piece of a made-up fleet, analysed in truth, laid end to end.

A piece begins and ends with the windows that are counted in, and nothing in it reaches into the next one. So what is
kept beside its events is the same in every copy but for times, numbers and ids, and need not be worked out again.
"""

# ruff: noqa: S608 -- the statements are made of constants

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrace import analyze, keeping, schema, stages
from kvtrace.schema.keeping import FINE_NS
from kvtrace.schema.shape import at_time
from kvtrace.store import Store
from kvtrace.testing import Fleet, fill

if TYPE_CHECKING:
    from pathlib import Path

PIECE = Fleet(4_500, per_s=240.0)
_AFTER_NS = 11_000_000_000  # so long after its last request the engines of a fleet go on with their steps, and a little
_PER_COPY = 1_000_000  # more than a piece has of steps, transfers or requests
_EVENTS_AT_ONCE = 4_000_000
_MEMORY = "8GB"
# Of each column that a copy changes: how; every other one is taken as it is. `later` is in ns, `more` a count.
_MOMENTS = (
    "t_ns", "start_ns", "end_ns", "first_token_ns", "from_ns", "first_ns", "prefill_from_ns", "prefill_to_ns",
    "decode_from_ns", "decode_to_ns", "kv_from_ns", "kv_to_ns", "prepared_ns", "post_started_ns", "post_ended_ns",
    "last_pending_ns", "done_ns", "probe_pending_ns", "probed_ns", "notified_ns", "failed_ns", "seen_ns",
    "scheduled_ns", "started_ns", "forwarded_ns", "connected_ns", "ended_ns",
)  # fmt: skip
_IDS = ("request", "ref", "request_id", "remote_request", "blamed_request_id", "waited_for", "note")
_CHANGED = {
    **{name: f"{name} + {{later}}" for name in _MOMENTS},
    **{name: f"replace({name}, 'kvt-000000', 'kvt-{{copy:06x}}')" for name in _IDS},
    **{name: f"{name} + {{more}}" for name in ("request_key", "transfer", "step")},
    "a": "a + is_numbered * {more}", "b": "b + is_moment * {later}",
}  # fmt: skip
_BEGUN = {"step": "coalesce(scheduled_ns, started_ns)", "transfer": "post_started_ns"}  # what column ts of each says
_COPIED = ("event", *schema.ANSWERS, "transfer", "step", "leg", "notable", "occurrence", "tally")


def span_ns(fleet: Fleet) -> int:
    """Return how long a piece of that fleet is: whole windows, and so long that the next one begins after its end."""
    return -(-(int(fleet.requests / fleet.per_s * 1e9) + _AFTER_NS) // FINE_NS) * FINE_NS


def ending(fleet: Fleet, requests: int, end_ns: int) -> Fleet:
    """Return the fleet as it has to begin for a store of so many requests to end before that time, unix ns."""
    length_ns = -(-requests // fleet.requests) * span_ns(fleet)
    return replace(fleet, start_ns=end_ns // FINE_NS * FINE_NS - length_ns)


def write(path: Path, requests: int, fleet: Fleet = PIECE) -> int:
    """Write a store of at least so many requests with all that follows from them; return how many events it has."""
    fleet = replace(fleet, start_ns=fleet.start_ns // FINE_NS * FINE_NS)
    with Store.open(path, "write") as store:
        events = fill(store, fleet)
        analyze.analyze(store)
        copies = -(-requests // fleet.requests)
        _lay(store, fleet, copies)
        end_ns = fleet.start_ns + copies * span_ns(fleet)
        store.execute("UPDATE process SET first_ns = 0, last_ns = (SELECT max(t_ns) FROM event)")
        keeping.refresh(store, end_ns)  # the coarse windows of times by cause
        store.execute("CHECKPOINT")
    return events * copies


def _lay(store: Store, fleet: Fleet, copies: int) -> None:
    """Lay copies of the piece that is in a store behind it, until there are so many with it."""
    store.execute(f"SET memory_limit = '{_MEMORY}'")
    first_ns, end_ns, events = store.select("SELECT min(t_ns), max(t_ns), count(*) FROM event").values[0]
    if first_ns < fleet.start_ns or end_ns >= fleet.start_ns + span_ns(fleet):
        raise ValueError(f"the piece's events lie outside of its {span_ns(fleet)} ns")
    for table in _COPIED:
        store.execute(_piece_sql(table))
    store.execute(
        "UPDATE piece_step SET gap_ns = scheduled_ns + $span - last.at_ns FROM "
        "(SELECT process, max(scheduled_ns) AS at_ns FROM piece_step GROUP BY process) AS last "
        "WHERE last.process = piece_step.process AND gap_ns IS NULL",
        {"span": span_ns(fleet)},
    )
    at_once = max(1, _EVENTS_AT_ONCE // events)
    for first in range(1, copies, at_once):
        for table in _COPIED:
            numbers = range(first, min(first + at_once, copies))
            copied = "\nUNION ALL ".join(_copy_sql(table, number, span_ns(fleet)) for number in numbers)
            store.execute(f"INSERT INTO {table} {copied}")
    for table in _COPIED:
        store.execute(f"DROP TABLE piece_{table}")


def _names(table: str) -> list[str]:
    return [column.name for column in schema.TABLE_BY_NAME[table].columns]


def _piece_sql(table: str) -> str:
    """Return the statement that sets the rows of a piece aside, made ready for being copied often.

    Six digits in the middle of every id give way to the number of the copy, so that ids stay as long as they are.
    """
    names = _names(table)
    values = [f"regexp_replace({name}, 'kvt-.{{6}}', 'kvt-000000') AS {name}" for name in names if name in _IDS]
    kept = f"SELECT * REPLACE ({', '.join(values)})" if values else "SELECT *"
    if "stage" in names and "a" in names:
        kept += f", (stage IN ({_with_field('a', 'step', 'transfer')}))::BIGINT AS is_numbered"
        kept += f", (stage IN ({_with_field('b', 'last_pending_ns')}) AND b > 0)::BIGINT AS is_moment"
    within = f" WHERE window_ns = {FINE_NS}" if table == "tally" else ""
    order = {"event": " ORDER BY t_ns", "request": " ORDER BY request_key"}.get(table, "")
    return f"CREATE TEMP TABLE piece_{table} AS {kept} FROM {table}{within}{order}"


def _with_field(slot: str, *fields: str) -> str:
    """Return SQL for the stages that keep one of these in a slot."""
    found = [one.name for one in stages.STAGES if any(f.slot == slot and f.name in fields for f in one.fields)]
    return ", ".join(map(schema.text, found))


def _copy_sql(table: str, number: int, span: int) -> str:
    """Return the SELECT of one copy of a piece's rows of one table."""
    begun = _BEGUN.get(table, "")
    changed = {**_CHANGED, "ts": at_time(f"({begun} + {{later}})")}
    words = {"later": number * span, "more": number * _PER_COPY, "copy": number}
    values = [changed.get(name, schema.quoted(name)).format(**words) for name in _names(table)]
    return f"SELECT {', '.join(values)} FROM piece_{table}"
