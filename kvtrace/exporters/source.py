"""What is exported: requests of a store in order of their start, with their path, their hidden work and their events.

Batches by time: what is held at once is one batch, the keys of all requests (24 bytes each), and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtrace import assemble, integrity, stages
from kvtrace.analyze import load_processes
from kvtrace.legs import base_ids
from kvtrace.model import Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvtrace.model import Process, Request, Transfer
    from kvtrace.store import Store

Row = dict[str, Any]

BATCH_REQUESTS = 500
NEVER_NS = 2**63 - 1
# P's last poll and the release of its blocks come after the answer.
_TAIL_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """Which requests: those of these keys, all where None, that started in [from_ns, to_ns), unix ns."""

    keys: tuple[int, ...] | None = None
    from_ns: int = 0
    to_ns: int = NEVER_NS

    @property
    def is_everything(self) -> bool:
        """Return whether nothing is left out."""
        return self == Choice()

    def parameters(self) -> dict[str, int | list[int] | None]:
        """Return the choice as a query's parameters."""
        return {"from": self.from_ns, "to": self.to_ns, "keys": None if self.keys is None else list(self.keys)}


@dataclass(slots=True)
class Told:
    """One request as the store tells it. `request` holds its events, None where the store has none of them."""

    row: Row
    segments: list[Row] = field(default_factory=list)
    hidden: list[Row] = field(default_factory=list)
    request: Request | None = None

    def first_ns(self, *wanted: stages.Stage) -> int | None:
        """Return when the first of these stages that was recorded at all was first reached, unix ns."""
        event = self.first(*wanted)
        return None if event is None else event.t_ns

    def first(self, *wanted: stages.Stage) -> Event | None:
        """Return the first event of the first of these stages that was recorded at all, None if none was."""
        if self.request is not None:
            for stage in wanted:
                if events := self.request.events.get(stage.name):
                    return min(events)
        return None

    def last_ns(self, prefix: str) -> int | None:
        """Return when a stage of serving whose name begins so was last reached, unix ns; None if none was."""
        events = self.request.events if self.request is not None else {}
        served = (found for name, found in events.items() if name.startswith(prefix) and name not in integrity.STAGES)
        return max((event.t_ns for found in served for event in found), default=None)


def seen_ns(transfer: Transfer, *, pushes: bool) -> int:
    """Return the first sign of completion seen by the side that needs the KV, else the last thing known, unix ns."""
    signs = (transfer.notified_ns, transfer.done_ns) if pushes else (transfer.done_ns, transfer.notified_ns)
    return next(filter(None, (*signs, transfer.probed_ns)), transfer.post_ended_ns or transfer.post_started_ns)


CHOSEN = "start_ns >= $from AND start_ns < $to AND ($keys IS NULL OR list_contains($keys::BIGINT[], request_key))"
"""What is chosen, as a condition on table request with the parameters of `Choice.parameters`."""

_KEYS_SQL = f"SELECT request_key FROM request WHERE {CHOSEN} ORDER BY start_ns, request_key"  # noqa: S608 -- of ours
_EXTENT_SQL = f"""
SELECT coalesce(min(start_ns), 0) AS from_ns, coalesce(max(greatest(end_ns, start_ns)), 0) AS to_ns FROM request
WHERE {CHOSEN}
"""  # noqa: S608 -- of ours
_STRETCHES_SQL = f"""
WITH begun AS (
  SELECT start_ns, greatest(end_ns, start_ns) AS end_ns, max(greatest(end_ns, start_ns)) OVER (
    ORDER BY start_ns, request_key ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns, request_key
  FROM request WHERE {CHOSEN}
), numbered AS (
  SELECT start_ns, end_ns, count(*) FILTER (start_ns - $apart > before_ns) OVER (
    ORDER BY start_ns, request_key ROWS UNBOUNDED PRECEDING) AS stretch
  FROM begun
)
SELECT min(start_ns) AS from_ns, max(end_ns) AS to_ns FROM numbered GROUP BY stretch ORDER BY from_ns
"""  # noqa: S608 -- of ours
# The range lets DuckDB pass over what cannot match; keys are given in the order of the analysis, hence of time.
_OF_KEYS = "request_key BETWEEN $least AND $most AND list_contains($keys::BIGINT[], request_key)"
_REQUESTS_SQL = f"SELECT * FROM request WHERE {_OF_KEYS} ORDER BY start_ns, request_key"  # noqa: S608 -- of ours
_SEGMENTS_SQL = f"SELECT * FROM segment WHERE {_OF_KEYS} ORDER BY request_key, position"  # noqa: S608 -- of ours
_HIDDEN_SQL = f"SELECT * FROM hidden WHERE {_OF_KEYS} ORDER BY request_key, start_ns, cause"  # noqa: S608 -- of ours
_NAMES_SQL = "SELECT DISTINCT request FROM event WHERE t_ns BETWEEN $from AND $to AND request <> ''"
_LINKED_SQL = """
SELECT DISTINCT request, "ref" AS other FROM event
WHERE t_ns BETWEEN $from AND $to AND stage::VARCHAR IN (SELECT unnest($stages)) AND "ref" <> ''
  AND (request IN (SELECT unnest($names)) OR "ref" IN (SELECT unnest($names)))
"""
_EVENTS_SQL = """
SELECT t_ns, stage::VARCHAR AS stage, process, request, "ref", a, b, c, d FROM event
WHERE t_ns BETWEEN $from AND $to AND request IN (SELECT unnest($names))
"""


def keys(store: Store, choice: Choice) -> list[int]:
    """Return the keys of the requests chosen, in order of their start."""
    found: list[int] = store.arrow(_KEYS_SQL, choice.parameters()).column(0).to_numpy().tolist()
    return found


def extent(store: Store, choice: Choice) -> tuple[int, int]:
    """Return when the first of the requests chosen starts and the last one ends, unix ns; zeros if there is none."""
    row = store.rows(_EXTENT_SQL, choice.parameters())[0]
    return row["from_ns"], row["to_ns"]


def stretches(store: Store, choice: Choice, apart_ns: int) -> list[tuple[int, int]]:
    """Return from when to when some of the requests chosen were under way, unix ns; shorter pauses count as none."""
    rows = store.rows(_STRETCHES_SQL, {**choice.parameters(), "apart": apart_ns})
    return [(row["from_ns"], row["to_ns"]) for row in rows]


def batches(store: Store, choice: Choice, batch_requests: int = BATCH_REQUESTS) -> Iterator[list[Told]]:
    """Yield the requests chosen, in order of their start, so many at once."""
    processes = load_processes(store)
    chosen = keys(store, choice)
    for first in range(0, len(chosen), batch_requests):
        yield told(store, chosen[first : first + batch_requests], processes)


def told(store: Store, chosen: Sequence[int], processes: Mapping[int, Process]) -> list[Told]:
    """Return the requests of these keys, in order of their start."""
    if not chosen:
        return []
    of_keys = {"keys": list(chosen), "least": min(chosen), "most": max(chosen)}
    rows = store.rows(_REQUESTS_SQL, of_keys)
    segments, hidden = (_by_request(store.rows(sql, of_keys)) for sql in (_SEGMENTS_SQL, _HIDDEN_SQL))
    requests = _assembled(store, rows, processes)
    found = []
    for row in rows:
        key = row["request_key"]
        found.append(Told(row, segments.get(key, []), hidden.get(key, []), _nearest(requests, row)))
    return found


def _by_request(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["request_key"]].append(row)
    return found


def _assembled(store: Store, rows: Sequence[Row], processes: Mapping[int, Process]) -> dict[str, list[Request]]:
    """Return the requests that the events of these rows make up, by id."""
    span = {
        "from": min((row["start_ns"] for row in rows), default=0),
        "to": max((row["end_ns"] or row["start_ns"] for row in rows), default=0) + _TAIL_NS,
    }
    bases = {base for row in rows for base in (row["request_id"], *base_ids(row["request_id"]))}
    candidates = {row["request"]: base_ids(row["request"]) for row in store.rows(_NAMES_SQL, span)}
    names = [name for name, possible in candidates.items() if bases.intersection(possible) or name in bases]
    linking = {"stages": [stages.DECODE_ENQUEUED.name, stages.MATCHED.name], "names": names, **span}
    # Engines may say themselves that two legs of different names are one request.
    linked = {name for row in store.rows(_LINKED_SQL, linking) for name in (row["request"], row["other"])}
    more = {base for name in linked for base in base_ids(name)} - bases
    names += [name for name, possible in candidates.items() if name not in bases and more.intersection(possible)]
    columns = [one.to_pylist() for one in store.arrow(_EVENTS_SQL, {"names": list(set(names)), **span}).columns]
    events = [Event(*values) for values in zip(*columns, strict=True)]
    found: dict[str, list[Request]] = defaultdict(list)
    for request in assemble.assemble(events, processes) if events else ():
        found[request.request_id].append(request)
    return found


def _nearest(requests: Mapping[str, list[Request]], row: Row) -> Request | None:
    """Return the request of that id that begins when the row does; an id may repeat."""
    same = requests.get(row["request_id"], [])
    return min(same, key=lambda one: abs(_first_ns(one) - row["start_ns"]), default=None)


def _first_ns(request: Request) -> int:
    return min(event.t_ns for events in request.events.values() for event in events)
