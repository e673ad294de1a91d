"""Requests of a store as `analyze` left them: found by a name, read whole, given as JSON. Nothing is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kvtrace.errors import RequestError, is_text
from kvtrace.messages import command_line
from kvtrace.verdict import UNDER_WAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtrace.store import Store

Row = dict[str, Any]

BATCH_REQUESTS = 1000
CANDIDATES_SHOWN = 10
_NAME_SHOWN_LETTERS = 80


@dataclass(frozen=True, slots=True)
class Explained:
    """One request with its critical path (in order, tiling start to first token) and what was hidden beside it."""

    request: Row
    segments: list[Row]
    hidden: list[Row]
    pace: Row | None = None
    parts: list[Row] = field(default_factory=list)
    blame: list[Row] = field(default_factory=list)

    def to_json(self) -> Row:
        """Return the request in the shape that `explain --json` promises; times and durations in ns."""
        request = self.request
        return {
            "request_id": request["request_id"],
            "mode": request["mode"],
            "verdict": request["verdict"],
            "scope": request["scope"],
            "client_request_id": request["client_request_id"],
            "attempt": request["attempt"],
            "join": request["join_method"],
            **{name: request[name] for name in (*_DURATIONS, *_TOLD)},
            "segments": [{name: segment[name] for name in _SEGMENT_KEYS} for segment in self.segments],
            "hidden": [{name: work[name] for name in _HIDDEN_KEYS} for work in self.hidden],
            "pace": self._pace_json(),
        }

    def _pace_json(self) -> Row | None:
        if self.pace is None:
            return None
        return {
            **{name: value for name, value in self.pace.items() if name != "request_key"},
            "parts": [{name: part[name] for name in _PART_KEYS} for part in self.parts],
            "blame": [{name: row[name] for name in _BLAME_KEYS} for row in self.blame],
        }


_DURATIONS = (
    "ttft_ns",
    "compute_ns",
    "compute_run_ns",
    "compute_queue_ns",
    "coordination_ns",
    "transfer_ns",
    "transfer_low_ns",
    "transfer_high_ns",
    "unattributed_ns",
)
_TOLD = (
    "start_ns",
    "first_token_ns",
    "end_ns",
    "prefill_engine",
    "decode_engine",
    "prompt_tokens",
    "output_tokens",
    "transfers",
    "moved_bytes",
    "descriptors",
    "crosses_hosts",
    "note",
)
_SEGMENT_KEYS = ("class", "cause", "where", "waited_for", "start_ns", "end_ns")
_HIDDEN_KEYS = ("cause", "class", "duration_ns", "slack_ns")
_PART_KEYS = ("cause", "class", "duration_ns")
_BLAME_KEYS = ("blamed_request_id", "extension_ns")

_REQUESTS_SQL = (
    "SELECT request.* REPLACE (CASE WHEN seen_ns IS NULL THEN verdict ELSE $under_way END AS verdict) "
    "FROM request LEFT JOIN under_way USING (request_key) WHERE list_contains($keys::BIGINT[], request_key)"
)
_ATTEMPTS_SQL = (
    "SELECT DISTINCT attempt FROM request WHERE request_id = $name OR client_request_id = $name ORDER BY attempt"
)
_SEGMENTS_SQL = "SELECT * FROM segment WHERE list_contains($keys::BIGINT[], request_key) ORDER BY request_key, position"
_HIDDEN_SQL = (
    "SELECT * FROM hidden WHERE list_contains($keys::BIGINT[], request_key) ORDER BY request_key, start_ns, cause"
)
_PACE_SQL = "SELECT * FROM pace WHERE list_contains($keys::BIGINT[], request_key) ORDER BY request_key"
_PARTS_SQL = (
    "SELECT * FROM pace_part WHERE list_contains($keys::BIGINT[], request_key) "
    "ORDER BY request_key, duration_ns DESC, cause"
)
_BLAME_SQL = (
    "SELECT * FROM blame WHERE list_contains($keys::BIGINT[], request_key) "
    "ORDER BY request_key, extension_ns DESC, blamed_request_id"
)


def run_facts(store: Store) -> dict[str, str]:
    """Return what the run recorded about itself: versions, command, workload."""
    return {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run ORDER BY name", {})}


def all_keys(store: Store) -> list[int]:
    """Return the keys of all requests, oldest first."""
    return _keys(store, "SELECT request_key FROM request ORDER BY start_ns, request_key")


def slowest_keys(store: Store, count: int) -> list[int]:
    """Return the keys of the `count` requests with the longest TTFT, slowest first."""
    return _keys(
        store,
        "SELECT request_key FROM request WHERE ttft_ns IS NOT NULL ORDER BY ttft_ns DESC, request_key LIMIT $count",
        {"count": count},
    )


def find_keys(store: Store, name: str) -> list[int]:
    """Return the keys of the requests that `name` means, oldest first.

    A whole id (the request's own or the client's) means every request that bears it; otherwise `name` must
    begin one id only. Raises RequestError when nothing matches, or more than one id does.
    """
    if not name or not is_text(name):  # every id in a store is text; "" is what stands there for none
        _refuse_unknown(store, name)
    exact = _keys(
        store,
        "SELECT request_key FROM request WHERE request_id = $name OR client_request_id = $name "
        "ORDER BY start_ns, request_key",
        {"name": name},
    )
    if exact:
        return exact
    rows = store.rows(
        "SELECT request_key, request_id, client_request_id FROM request "
        "WHERE starts_with(request_id, $name) OR starts_with(client_request_id, $name) ORDER BY start_ns, request_key",
        {"name": name},
    )
    if not rows:
        return _refuse_unknown(store, name)
    shared = set.intersection(*({row["request_id"], row["client_request_id"]} for row in rows))
    if len(rows) > 1 and not any(label is not None and label.startswith(name) for label in shared):
        _refuse_ambiguous(name, rows)
    return [row["request_key"] for row in rows]


def require_named(store: Store, name: str, attempt: object) -> None:
    """Raise RequestError unless a request bears this whole id, its own or the client's, and is that attempt, if any."""
    rows = store.rows(_ATTEMPTS_SQL, {"name": name}) if is_text(name) else []
    if not rows:
        raise RequestError(f"no request is called {_short(name)!r} (a whole id is needed here); {_ids_listed(store)}")
    attempts = [row["attempt"] for row in rows]
    if attempt is not None and attempt not in attempts:
        raise RequestError(f"request {_short(name)!r} has no attempt {attempt}; it has {', '.join(map(str, attempts))}")


def explained(store: Store, keys: Sequence[int]) -> Iterator[Explained]:
    """Yield the requests of these keys in this order, read in batches."""
    for first in range(0, len(keys), BATCH_REQUESTS):
        batch = list(keys[first : first + BATCH_REQUESTS])
        requests = {
            row["request_key"]: row for row in store.rows(_REQUESTS_SQL, {"keys": batch, "under_way": UNDER_WAY})
        }
        segments = _by_request(store.rows(_SEGMENTS_SQL, {"keys": batch}))
        hidden, parts, blame = (
            _by_request(store.rows(sql, {"keys": batch})) for sql in (_HIDDEN_SQL, _PARTS_SQL, _BLAME_SQL)
        )
        paces = {row["request_key"]: row for row in store.rows(_PACE_SQL, {"keys": batch})}
        for key in batch:
            beside = (segments, hidden, parts, blame)
            path, work, pace_parts, blamed = (found.get(key, []) for found in beside)
            yield Explained(requests[key], path, work, paces.get(key), pace_parts, blamed)


def _by_request(rows: list[Row]) -> dict[int, list[Row]]:
    return {key: list(group) for key, group in groupby(rows, key=itemgetter("request_key"))}


def _keys(store: Store, sql: str, parameters: Mapping[str, object] | None = None) -> list[int]:
    return [row["request_key"] for row in store.rows(sql, dict(parameters or {}))]


def _refuse_unknown(store: Store, name: str) -> list[int]:
    raise RequestError(f"no request is called or begins with {_short(name)!r}; {_ids_listed(store)}")


def _ids_listed(store: Store) -> str:
    """Return which command lists the ids of a store's newest requests."""
    newest = "SELECT request_id, client_request_id FROM request ORDER BY start_ns DESC LIMIT 20"
    return f"`{command_line('sql', store.path, newest)}` lists the newest ids"


def _refuse_ambiguous(name: str, rows: list[Row]) -> None:
    shown = [_candidate(row) for row in rows[:CANDIDATES_SHOWN]]
    if len(rows) > CANDIDATES_SHOWN:
        shown.append(f"and {len(rows) - CANDIDATES_SHOWN} more")
    raise RequestError(f"{_short(name)!r} begins {len(rows)} requests, name one of them: {', '.join(shown)}")


def _candidate(row: Row) -> str:
    client = row["client_request_id"]
    return _short(row["request_id"]) + (f" (client id {_short(client)})" if client else "")


def _short(text: str) -> str:
    if len(text) <= _NAME_SHOWN_LETTERS:
        return text
    half = _NAME_SHOWN_LETTERS // 2
    return f"{text[:half]}...{text[-half:]}"
