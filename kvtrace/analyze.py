"""From stored events to stored answers: the only place that strings the analysis together."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

from kvtrace import answers, assemble, attempts, attribution, graph, keeping, looks, occupancy, schema, stages
from kvtrace.copies import COPY_STAGES
from kvtrace.legs import BEFORE_ID, TRANSFER_STAGES, base_ids, remote_ids
from kvtrace.model import NEVER_NS, Attribution, Event, Process, Request
from kvtrace.schema.keeping import LOOK_BACK_NS
from kvtrace.store import Store

Writing = Callable[[], int]
"""Writes answers that were worked out, and returns how many requests that are."""

_EVENT_COLUMNS = 't_ns, stage::VARCHAR AS stage, process, request, "ref", a, b, c, d'
WHOLE_ANALYSIS_EVENTS = 200_000
"""Stores up to this size are worked out whole once more when their events are complete; larger ones in part."""
_RANKS_MAX = 1 << 16
_NUMBER_MAX = 1 << 53
# A step that began this long before a request may matter to it.
_MARGIN_NS = 10_000_000_000
# What other requests did longer before is not seen to matter to one that is worked out while the run goes on.
_BESIDE_NS = 60_000_000_000
_BESIDE_EVENTS = 30_000  # the newest of them; under heavy load a minute of others takes longer than those asked for


def analyze(store: Store, since_ns: int | None = None) -> int:
    """Write the tables of `schema.WORKED_OUT` but `finding` from the event table; return the number of requests.

    With `since_ns` (unix ns) only requests that have an event at or after it are worked out again.
    """
    return worked_out(store, since_ns)()


def worked_out(store: Store, since_ns: int | None = None, meanwhile: Callable[[], None] | None = None) -> Writing:
    """Work out what `analyze` writes; return what writes it, which wants a transaction around.

    `meanwhile` is called between two parts of the work and may add events, of which these answers then do not know.
    """
    meanwhile = meanwhile or _nothing
    # What is made here goes when its last user does, and looking for cycles among it took a tenth of the time.
    with _uncollected():
        processes = load_processes(store)
        events, beside = (load_events(store), []) if since_ns is None else _load_recent(store, since_ns)
        meanwhile()
        requests = assemble.assemble(events, processes)
        others = _of_others(beside, processes)
        meanwhile()
        around = attribution.surroundings([*events, *beside], [*requests, *others], processes)
        if since_ns is not None:
            requests = _begun_since(store, requests, since_ns - LOOK_BACK_NS)
        found = []
        for request in requests:
            meanwhile()
            found.append(attribution.attribute(request, around))
    return partial(_write, store, found, since_ns)


def _write(store: Store, found: list[Attribution], since_ns: int | None) -> int:
    if since_ns is None:
        for table in schema.ANSWERS:
            store.execute(f"DELETE FROM {table}")  # noqa: S608 -- names of ours, values are bound
    from_ns = None if since_ns is None else since_ns - LOOK_BACK_NS
    changed_ns = answers.write(store, found, replace_from_ns=from_ns)
    keeping.refresh(store, since_ns, changed_ns)
    return len(found)


def _nothing() -> None:
    """Do nothing meanwhile."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python from looking for cycles of objects in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _begun_since(store: Store, requests: list[Request], from_ns: int) -> list[Request]:
    """Return the requests of which everything has been loaded: of others, which are under way for long, only an end is.

    Their stored answers stay. One that bears an old id anew is told by its arrival, after all that the old one did.
    """
    has_arrived = [_first_stage(request) in _ARRIVALS for request in requests]
    # The earlier one's end is within what was loaded, so not all that a long recording holds is looked through.
    under_way = _earlier(store, compress(requests, has_arrived), from_ns, "end_ns >= $from")
    ever = _earlier(store, compress(requests, map(not_, has_arrived)), from_ns, "true")
    return [
        request
        for request, has_come in zip(requests, has_arrived, strict=True)
        if (under_way if has_come else ever).isdisjoint(answers.names(request))
    ]


def _first_stage(request: Request) -> str:
    return min((event for events in request.events.values() for event in events), key=lambda event: event.t_ns).stage


def _earlier(store: Store, requests: Iterable[Request], from_ns: int, among: str) -> set[str]:
    """Return under which ids of these requests stored ones began before that time, of those where `among` holds."""
    names = sorted({name for request in requests for name in answers.names(request)})
    sql = f"""
SELECT DISTINCT request_id FROM request
WHERE start_ns < $from AND {among} AND request_id IN (SELECT unnest($names::VARCHAR[]))
"""  # noqa: S608 -- names of ours, values are bound
    return {row["request_id"] for row in store.rows(sql, {"from": from_ns, "names": names})} if names else set()


_ARRIVALS = frozenset((
    stages.CLIENT_SENT.name, stages.ROUTER_RECEIVED.name, stages.PREFILL_HTTP_RECEIVED.name,
    stages.DECODE_HTTP_RECEIVED.name, stages.PREFILL_ENQUEUED.name, stages.DECODE_ENQUEUED.name,
))  # fmt: skip


def _of_others(beside: list[Event], processes: Mapping[int, Process]) -> list[Request]:
    """Return the other requests: what they posted meanwhile and how fast their transfers were counts in walks too."""
    return assemble.assemble((event for event in beside if event.request), processes)


def _load_recent(store: Store, since_ns: int) -> tuple[list[Event], list[Event]]:
    """Return every event of the requests that have one since then, and what their engines did meanwhile."""
    fresh = store.rows("SELECT DISTINCT request FROM event WHERE t_ns >= $since AND request <> ''", {"since": since_ns})
    bases = {base for row in fresh for base in base_ids(row["request"])}
    return _load_of(store, bases, since_ns - LOOK_BACK_NS, NEVER_NS)


def _load_of(store: Store, bases: set[str], from_ns: int, to_ns: int) -> tuple[list[Event], list[Event]]:
    """Return the events in that time of the requests that bear one of these ids, and what their engines did meanwhile.

    A retry belongs to the requests that bear its client's id, and whoever holds blocks may keep others waiting.
    """
    span = {"from": from_ns, "to": to_ns}
    bases = set(bases)
    named = store.rows(_NAMED_SQL, {**span, "stage": stages.ROUTER_RECEIVED.name})
    clients = Counter(row["client"] for row in named)
    wanted = {row["client"] for row in named if row["request"] in bases and clients[row["client"]] <= attempts.CROWD}
    bases.update(row["request"] for row in named if row["client"] in wanted)
    ids = _names(store, span, bases)
    named_to_d = [name for base in bases for name in remote_ids(base)]
    linking = {**span, "stages": sorted(_LINKING), "carrying": sorted(_CARRYING), "names": [*ids, *named_to_d]}
    linked = {base for row in store.rows(_LINKED_SQL, linking) for one in row.values() for base in base_ids(one)}
    if not linked <= bases:
        ids = _names(store, span, bases | linked)
    if not ids:
        return [], []
    events = _events(store, f"{_SELECT} AND request IN (SELECT unnest($ids)) ORDER BY t_ns", {**span, "ids": ids})
    first_ns = min(event.t_ns for event in events)
    around = {"from": first_ns - _MARGIN_NS, "to": to_ns}
    holding = {
        "from": first_ns - _BESIDE_NS, "to": to_ns, "ids": ids, "stages": sorted(_BESIDE), "most": _BESIDE_EVENTS,
    }  # fmt: skip
    return events, _events(store, f"{_SELECT} AND request = ''", around) + _events(store, _BESIDE_SQL, holding)


def _names(store: Store, span: dict[str, int], bases: set[str]) -> list[str]:
    """Return the ids in that time that may be an engine's for one of these ids.

    Ten minutes hold a hundred thousand ids, so all but those that begin as one of these are left out before.
    """
    length = min(map(len, bases), default=0)
    given = {**span, "length": length, "heads": sorted({base[:length] for base in bases})}
    return [name for (name,) in store.select(_NAMES_SQL, given).values if not bases.isdisjoint(base_ids(name))]


# Of other requests count who holds blocks or is in their way in a queue, what was posted and copied, how long messages
# and transfers took, and whose those are.
_BESIDE = frozenset((
    *occupancy.STAGES, *looks.STAGES, *TRANSFER_STAGES, *COPY_STAGES, stages.NOTIFIED.name,
    stages.MATCHED.name,
    stages.LOAD_STARTED.name, stages.REGISTRATION_SENT.name, stages.REGISTRATION_RECEIVED.name,
    stages.ROUTER_RECEIVED.name, stages.PREFILL_HTTP_RECEIVED.name, stages.DECODE_HTTP_RECEIVED.name,
    stages.DECODE_SCHEDULED.name,
))  # fmt: skip
_WITHIN = "t_ns BETWEEN $from AND $to"
_SELECT = f"SELECT {_EVENT_COLUMNS} FROM event WHERE {_WITHIN}"  # noqa: S608 -- names of ours, values are bound
_BESIDE_SQL = f"""
{_SELECT} AND request <> '' AND stage::VARCHAR IN (SELECT unnest($stages)) AND request NOT IN (SELECT unnest($ids))
ORDER BY t_ns DESC LIMIT $most
"""
_NAMED_SQL = f"""
SELECT DISTINCT request, "ref" AS client FROM event WHERE {_WITHIN} AND stage::VARCHAR = $stage AND "ref" <> ''
"""  # noqa: S608 -- the same
_NAMES_SQL = f"""
SELECT request FROM (SELECT DISTINCT request FROM event WHERE {_WITHIN} AND request <> '')
WHERE left(regexp_replace(request, {schema.text(BEFORE_ID)}, ''), $length) IN (SELECT unnest($heads::VARCHAR[]))
"""  # noqa: S608 -- the same
# Legs are linked by an id that one names of the other, or by the transfer_id that both carry.
_CARRYING = frozenset((stages.PREFILL_ALLOCATED.name, stages.DECODE_ALLOCATED.name))
_LINKING = _CARRYING | {stages.DECODE_ENQUEUED.name, stages.MATCHED.name}
_LINKED_SQL = f"""
WITH told AS MATERIALIZED (
  SELECT request, "ref" AS other, stage::VARCHAR IN (SELECT unnest($carrying)) AS carries FROM event
  WHERE {_WITHIN} AND "ref" <> '' AND stage::VARCHAR IN (SELECT unnest($stages))
)
SELECT DISTINCT request, other FROM told
WHERE NOT carries AND (request IN (SELECT unnest($names)) OR other IN (SELECT unnest($names)))
UNION ALL
SELECT DISTINCT request, request FROM told
WHERE carries AND other IN (SELECT other FROM told WHERE carries AND request IN (SELECT unnest($names)))
"""  # noqa: S608 -- the same


def points(store: Store, request: Mapping[str, Any]) -> dict[str, int]:
    """Return the points of one row of table request: name -> unix ns, derived ones included.

    The poll that saw a transfer done stands beside the notification, whichever of them the request waited for.
    """
    from_ns, to_ns = request["start_ns"] - _MARGIN_NS, (request["end_ns"] or request["start_ns"]) + _MARGIN_NS
    events, beside = _load_of(store, set(base_ids(request["request_id"])), from_ns, to_ns)
    processes = load_processes(store)
    requests = assemble.assemble(events, processes)
    others = _of_others(beside, processes)
    shared = attribution.surroundings([*events, *beside], [*requests, *others], processes)
    same = [one for one in requests if one.request_id == request["request_id"]]
    if not same:
        return {}
    # An id may repeat: the one meant is the one that begins when the row says.
    nearest = min(same, key=lambda one: abs(one.first_ns - request["start_ns"]))
    built = graph.build(nearest, shared)
    found = {name: point.t_ns for name, point in built.points.items()}
    if built.transfer is not None and built.transfer.done_ns:
        found[stages.TRANSFER_DONE.name] = built.transfer.done_ns
    return found


def load_processes(store: Store) -> dict[int, Process]:
    """Return the processes of the run by number. API servers take their engine from the core process they started."""
    rows = store.rows("SELECT process, domain, host, pid, parent_pid, offset_ns, facts FROM process")
    engine_of_parent = {
        (row["host"], row["domain"], row["parent_pid"]): _facts(row).get("engine_id", "")
        for row in rows
        if _facts(row).get("engine_id")
    }
    processes = {}
    for row in rows:
        facts = _facts(row)
        engine = facts.get("engine_id") or engine_of_parent.get((row["host"], row["domain"], row["pid"]), "")
        processes[row["process"]] = Process(
            process=row["process"],
            kind=facts.get("kind", ""),
            engine=engine,
            domain=f"{row['host']}/{row['domain']}",
            offset_ns=row["offset_ns"] or 0,
            tp_size=_number(facts, "tp_size", _RANKS_MAX) or 1,
            imported=facts.get("imported", ""),
            max_tokens=_number(facts, "max_num_batched_tokens"),
            max_requests=_number(facts, "max_num_seqs"),
        )
    return processes


def _number(facts: dict[str, str], name: str, most: int = _NUMBER_MAX) -> int:
    """Return the fact as a number, 0 where it is missing, none, or larger than `most`."""
    value = facts.get(name, "")
    number = int(value) if value.isdecimal() and len(value) <= len(str(most)) else 0
    return number if number <= most else 0


def _facts(row: dict[str, Any]) -> dict[str, str]:
    return dict(row["facts"] or {})


def load_events(store: Store) -> list[Event]:
    """Return the events of the run in time order."""
    return _events(store, f"SELECT {_EVENT_COLUMNS} FROM event ORDER BY t_ns", {})  # noqa: S608 -- names of ours, values are bound


def _events(store: Store, sql: str, params: dict[str, Any]) -> list[Event]:
    columns = [column.to_pylist() for column in store.arrow(sql, params).columns]
    return [Event(*values) for values in zip(*columns, strict=True)]
