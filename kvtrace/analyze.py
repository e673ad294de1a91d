"""From stored events to stored answers: the only place that strings the analysis together."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from kvtrace import assemble, attempts, attribution, evidence, graph, keeping, occupancy, schema, stages
from kvtrace.legs import TRANSFER_STAGES, base_ids
from kvtrace.model import NEVER_NS, Attribution, Event, Process, Request
from kvtrace.store import Store

_EVENT_COLUMNS = 't_ns, stage::VARCHAR AS stage, process, request, "ref", a, b, c, d'
WHOLE_ANALYSIS_EVENTS = 200_000
"""Stores up to this size are worked out whole once more when their events are complete; larger ones in part."""
# A request older than this is not worked out again, and a step that began this long before a request may matter to it.
_LOOK_BACK_NS = 600_000_000_000
_MARGIN_NS = 10_000_000_000
# What other requests did longer before is not seen to matter to one that is worked out while the run goes on.
_BESIDE_NS = 60_000_000_000
_BESIDE_EVENTS = 30_000  # the newest of them; under heavy load a minute of others takes longer than those asked for


def analyze(store: Store, since_ns: int | None = None) -> int:
    """Write the tables of `schema.WORKED_OUT` from the event table; return how many requests were attributed.

    With `since_ns` (unix ns) only requests that have an event at or after it are worked out again.
    """
    processes = load_processes(store)
    beside: list[Event] = []
    if since_ns is None:
        events = load_events(store)
        for table in schema.ANSWERS:
            store.execute(f"DELETE FROM {table}")  # noqa: S608 -- names of ours, values are bound
    else:
        events, beside = _load_recent(store, since_ns)
    requests = assemble.assemble(events, processes)
    around = _surroundings(events, beside, requests, processes)
    from_ns = None if since_ns is None else since_ns - _LOOK_BACK_NS
    if from_ns is not None:
        requests = _begun_since(store, requests, from_ns)
    answers = [attribution.attribute(request, around) for request in requests]
    changed_ns = write(store, answers, replace_from_ns=from_ns)
    keeping.refresh(store, since_ns, changed_ns)
    return len(answers)


def _begun_since(store: Store, requests: list[Request], from_ns: int) -> list[Request]:
    """Return the requests of which everything has been loaded: of others, which are under way for long, only an end is.

    Their stored answers stay. One that bears an old id anew is told by its arrival, after all that the old one did.
    """
    names = sorted({name for request in requests for name in _names(request)})
    found = store.rows(_EARLIER_SQL, {"from": from_ns, "names": names})
    ended_ns = {row["request_id"]: row["end_ns"] for row in found}

    def is_whole(request: Request) -> bool:
        known = [ended_ns[name] for name in _names(request) if name in ended_ns]
        first = min((event for events in request.events.values() for event in events), key=lambda event: event.t_ns)
        return not known or (first.stage in _ARRIVALS and max(known) < from_ns)

    return [request for request in requests if is_whole(request)]


_ARRIVALS = frozenset((
    stages.CLIENT_SENT.name, stages.ROUTER_RECEIVED.name, stages.PREFILL_HTTP_RECEIVED.name,
    stages.DECODE_HTTP_RECEIVED.name, stages.PREFILL_ENQUEUED.name, stages.DECODE_ENQUEUED.name,
))  # fmt: skip
_EARLIER_SQL = """
SELECT request_id, max(coalesce(end_ns, start_ns)) AS end_ns FROM request
WHERE start_ns < $from AND request_id IN (SELECT unnest($names::VARCHAR[])) GROUP BY request_id
"""


def _surroundings(
    events: list[Event], beside: list[Event], requests: list[Request], processes: Mapping[int, Process]
) -> graph.Surroundings:
    """Return what walks need: what others posted meanwhile and how fast their transfers were counts as well."""
    others = assemble.assemble((event for event in beside if event.request), processes)
    return attribution.surroundings([*events, *beside], [*requests, *others], processes)


def _load_recent(store: Store, since_ns: int) -> tuple[list[Event], list[Event]]:
    """Return every event of the requests that have one since then, and what their engines did meanwhile."""
    fresh = store.rows("SELECT DISTINCT request FROM event WHERE t_ns >= $since AND request <> ''", {"since": since_ns})
    bases = {base for row in fresh for base in base_ids(row["request"])}
    return _load_of(store, bases, since_ns - _LOOK_BACK_NS, NEVER_NS)


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
    known = store.rows(f"SELECT DISTINCT request FROM event WHERE {_WITHIN} AND request <> ''", span)  # noqa: S608 -- names of ours, values are bound
    candidates = {row["request"]: base_ids(row["request"]) for row in known}
    ids = [name for name, possible in candidates.items() if bases.intersection(possible)]
    linking = {**span, "stages": [stages.DECODE_ENQUEUED.name, stages.MATCHED.name], "names": ids}
    for row in store.rows(_LINKED_SQL, linking):
        bases.update(base_ids(row["request"]), base_ids(row["other"]))
    ids = [name for name, possible in candidates.items() if bases.intersection(possible)]
    if not ids:
        return [], []
    events = _events(store, f"{_SELECT} AND request IN (SELECT unnest($ids)) ORDER BY t_ns", {**span, "ids": ids})
    first_ns = min(event.t_ns for event in events)
    around = {"from": first_ns - _MARGIN_NS, "to": to_ns}
    holding = {
        "from": first_ns - _BESIDE_NS, "to": to_ns, "ids": ids, "stages": sorted(_BESIDE), "most": _BESIDE_EVENTS,
    }  # fmt: skip
    return events, _events(store, f"{_SELECT} AND request = ''", around) + _events(store, _BESIDE_SQL, holding)


# Of other requests count who holds blocks or is in their way in a queue, what was posted, how long messages and
# transfers took, and whose those are.
_BESIDE = frozenset((
    *occupancy.STAGES, *evidence.QUEUE_STAGES, *TRANSFER_STAGES, stages.NOTIFIED.name, stages.MATCHED.name,
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
_LINKED_SQL = f"""
SELECT DISTINCT request, "ref" AS other FROM event
WHERE {_WITHIN} AND stage::VARCHAR IN (SELECT unnest($stages)) AND "ref" <> ''
  AND (request IN (SELECT unnest($names)) OR "ref" IN (SELECT unnest($names)))
"""  # noqa: S608 -- the same


def _names(request: Request) -> set[str]:
    """Return every id under which a row for this request may stand."""
    seen = {event.request for events in request.events.values() for event in events}
    return {request.request_id, request.base_id, *seen}


def points(store: Store, request: Mapping[str, Any]) -> dict[str, int]:
    """Return the points of one row of table request: name -> unix ns, derived ones included.

    The poll that saw a transfer done stands beside the notification, whichever of them the request waited for.
    """
    from_ns, to_ns = request["start_ns"] - _MARGIN_NS, (request["end_ns"] or request["start_ns"]) + _MARGIN_NS
    events, beside = _load_of(store, set(base_ids(request["request_id"])), from_ns, to_ns)
    processes = load_processes(store)
    requests = assemble.assemble(events, processes)
    shared = _surroundings(events, beside, requests, processes)
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
            tp_size=int(facts.get("tp_size") or 1),
            imported=facts.get("imported", ""),
        )
    return processes


def _facts(row: dict[str, Any]) -> dict[str, str]:
    return dict(row["facts"] or {})


def load_events(store: Store) -> list[Event]:
    """Return the events of the run in time order."""
    return _events(store, f"SELECT {_EVENT_COLUMNS} FROM event ORDER BY t_ns", {})  # noqa: S608 -- names of ours, values are bound


def _events(store: Store, sql: str, params: dict[str, Any]) -> list[Event]:
    columns = [column.to_pylist() for column in store.arrow(sql, params).columns]
    return [Event(*values) for values in zip(*columns, strict=True)]


def write(store: Store, answers: Iterable[Attribution], *, replace_from_ns: int | None) -> set[int]:
    """Write answers to the tables of `schema.ANSWERS`, in place of those for these requests that begin then or later.

    None replaces none.
    Returns when the requests began whose answers are new or have gone, unix ns.
    """
    answers = list(answers)
    if not answers:
        return set()
    changed_ns = {answer.start_ns for answer in answers}
    if replace_from_ns is not None:
        # A row bears the id of its legs until their front end is seen, and that of its front end from then on.
        ids = pa.table({"request_id": sorted({name for answer in answers for name in _names(answer.request)})})
        changed_ns.update(store.forget_requests(ids, replace_from_ns))
    first_key = store.next_request_key()
    keyed = list(enumerate(answers, start=first_key))
    store.append(
        "request",
        pa.Table.from_pylist(
            [_request_row(key, answer) for key, answer in keyed], schema=store.arrow_schema("request")
        ),
    )
    store.append("segment", pa.Table.from_pylist(list(_segment_rows(keyed)), schema=store.arrow_schema("segment")))
    for table, rows in (
        ("hidden", _hidden_rows(keyed)),
        ("pace", _pace_rows(keyed)),
        ("pace_part", _pace_part_rows(keyed)),
        ("blame", _blame_rows(keyed)),
    ):
        store.append(table, pa.Table.from_pylist(list(rows), schema=store.arrow_schema(table)))
    return changed_ns


def _request_row(key: int, answer: Attribution) -> dict[str, Any]:
    request, shares = answer.request, answer.shares_ns
    has_token = answer.ttft_ns is not None
    run_ns, queue_ns = shares[stages.Class.RUN.value], shares[stages.Class.QUEUE.value]
    row: dict[str, Any] = {
        "request_key": key,
        "request_id": request.request_id,
        "client_request_id": request.client_request_id,
        "attempt": request.attempt,
        "mode": request.mode,
        "verdict": answer.verdict,
        "scope": answer.scope,
        "join_method": request.join_method,
        "prefill_engine": request.prefill_engine,
        "decode_engine": request.decode_engine,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "start_ns": answer.start_ns,
        "first_token_ns": answer.first_token_ns,
        "end_ns": answer.end_ns,
        "registration_late_ns": answer.registration_late_ns,
        "moved_bytes": sum(transfer.moved_bytes for transfer in request.transfers),
        "descriptors": sum(transfer.descriptors for transfer in request.transfers),
        "transfers": len(request.transfers),
        **answer.blocks._asdict(),
        "straggler_rank": answer.straggler.rank if answer.straggler else None,
        "straggler_ns": answer.straggler.waited_ns if answer.straggler else None,
        **_integrity(answer),
        "crosses_hosts": any(segment.crosses_hosts for segment in answer.segments),
        "idle_ns": answer.idle_ns,
        "lost_ns": request.lost[-1].end_ns - request.lost[0].start_ns if request.lost else None,
        "note": answer.note,
        **_spent(answer),
        "tpot_ns": answer.pace.tpot_ns if answer.pace is not None else None,
        "decode_tokens": answer.pace.tokens if answer.pace is not None else None,
    }
    shown = {
        "ttft_ns": answer.ttft_ns,
        "compute_ns": run_ns + queue_ns,
        "compute_run_ns": run_ns,
        "compute_queue_ns": queue_ns,
        "coordination_ns": shares[stages.Class.COORDINATION.value],
        "transfer_ns": shares[stages.Class.TRANSFER.value],
        "transfer_low_ns": answer.transfer_low_ns,
        "transfer_high_ns": answer.transfer_high_ns,
        "unattributed_ns": shares[stages.Class.UNATTRIBUTED.value],
    }
    row.update(shown if has_token else dict.fromkeys(shown))
    return row


def _spent(answer: Attribution) -> dict[str, int | None]:
    """Return what some causes took on the path, None for those that do not lie there."""
    spent: dict[str, int | None] = dict.fromkeys(("post_ns", "wire_ns", "detection_ns"))
    for segment in answer.segments:
        if (name := f"{segment.cause}_ns") in spent:
            spent[name] = (spent[name] or 0) + segment.end_ns - segment.start_ns
    return spent


def _integrity(answer: Attribution) -> dict[str, int | None]:
    found = answer.integrity
    if found is None:
        return dict.fromkeys(("checked_blocks", "corrupt_blocks", "unchecked_blocks"))
    corrupt = len(found.corrupt)
    return {"checked_blocks": found.checked, "corrupt_blocks": corrupt, "unchecked_blocks": found.unchecked}


def _segment_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        for position, segment in enumerate(answer.segments):
            cause = stages.CAUSE_BY_NAME[segment.cause]
            yield {
                "request_key": key,
                "position": position,
                "class": cause.kind.value,
                "cause": cause.name,
                "where": cause.where.value,
                "waited_for": segment.waited_for,
                "start_ns": segment.start_ns,
                "end_ns": segment.end_ns,
                "crosses_hosts": segment.crosses_hosts,
            }


def _hidden_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        for hidden in answer.hidden:
            cause = stages.CAUSE_BY_NAME[hidden.cause]
            yield {
                "request_key": key,
                "cause": cause.name,
                "class": cause.kind.value,
                "where": cause.where.value,
                "start_ns": hidden.start_ns,
                "duration_ns": hidden.duration_ns,
                "slack_ns": hidden.slack_ns,
            }


def _pace_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        if (pace := answer.pace) is not None:
            yield {
                "request_key": key,
                "start_ns": pace.start_ns,
                "end_ns": pace.end_ns,
                "tokens": pace.tokens,
                "steps": len(pace.itl_ns),
                "tpot_ns": pace.tpot_ns,
                "itl_p50_ns": int(statistics.median(pace.itl_ns)) if pace.itl_ns else None,
                "itl_max_ns": max(pace.itl_ns, default=None),
                "extension_ns": pace.extension_ns,
                "occupancy_ns": pace.occupancy_ns,
            }


def _pace_part_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        if answer.pace is not None:
            for name, duration_ns in answer.pace.parts_ns.items():
                kind = stages.CAUSE_BY_NAME[name].kind.value
                yield {"request_key": key, "cause": name, "class": kind, "duration_ns": duration_ns}


def _blame_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        if answer.pace is not None:
            for name, spent_ns in answer.pace.blame_ns.items():
                yield {"request_key": key, "blamed_request_id": name, "extension_ns": spent_ns}
