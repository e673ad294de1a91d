"""Both engines of attribution on one store: what the reference says of its requests, and whether SQL says the same."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvtrace import assemble, attribution, stages
from kvtrace.analyze import load_events, load_processes
from kvtrace.model import Attribution, Event
from kvtrace.schema.walk import answers
from kvtrace.store import Store
from tests.trace import MS, Trace, ns
from tests.walk_ranks import ONE, Shape
from tests.walk_scenes import Scene, processes, scene

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SEED = 7
Row = dict[str, Any]


def filled(path: Path, scenes: range, requests: int) -> Store:
    """Return an open store that holds the scenes of these numbers."""
    return stored(path, [scene(number, requests, SEED) for number in scenes])


def stored(path: Path, made: Sequence[Scene]) -> Store:
    """Return an open store that holds these scenes."""
    store = Store.open(path, "write")
    rows = [row for one in made for row in one.rows]
    store.append("process", pa.Table.from_pylist(rows, schema=store.arrow_schema("process")))
    events = [dict(zip(Event._fields, event, strict=True)) for one in made for event in one.events]
    store.append("event", pa.Table.from_pylist(events))
    return store


def reference(store: Store) -> list[Attribution]:
    """Return what the reference walk says of every request of a store."""
    processes, events = load_processes(store), load_events(store)
    requests = assemble.assemble(events, processes)
    around = attribution.surroundings(events, requests, processes)
    return [attribution.attribute(request, around) for request in requests]


def expected(answer: Attribution) -> Row:
    """Return the row that SQL has to give for a request."""
    request, shares = answer.request, answer.shares_ns
    row: Row = {
        "client_request_id": request.client_request_id, "mode": request.mode, "ttft_ns": answer.ttft_ns,
        "prefill_engine": request.prefill_engine, "decode_engine": request.decode_engine,
        "first_token_ns": answer.first_token_ns, "scope": answer.scope,
    }  # fmt: skip
    if answer.ttft_ns is not None:
        row |= {
            "start_ns": answer.start_ns, "compute_run_ns": shares["compute.run"],
            "compute_queue_ns": shares["compute.queue"], "coordination_ns": shares["coordination"],
            "compute_ns": shares["compute.run"] + shares["compute.queue"], "transfer_ns": shares["transfer"],
            "unattributed_ns": shares["unattributed"], "transfer_low_ns": answer.transfer_low_ns,
            "transfer_high_ns": answer.transfer_high_ns,
        }  # fmt: skip
    return row


def path_of(spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return a path's stretches in order, neighbours of one cause as one."""
    merged: list[tuple[int, int, str]] = []
    for start_ns, end_ns, cause in sorted(spans):
        if merged and merged[-1][1:] == (start_ns, cause):
            merged[-1] = (merged[-1][0], end_ns, cause)
        else:
            merged.append((start_ns, end_ns, cause))
    return merged


def compare(store: Store, edges: Sequence[stages.Edge] | None = None) -> float:
    """Assert that SQL and the reference agree wherever SQL answers; return the share of requests that it answers.

    Without other edges than those of the vocabulary, SQL is what the views say that every store holds.
    """
    asked = ("FROM walk_request", "FROM walk_segment")
    if edges is not None:
        asked = (answers.requests(edges), answers.segments(edges))
    by_base: dict[str, list[Attribution]] = defaultdict(list)
    for answer in reference(store):
        by_base[answer.request.base_id].append(answer)
    rows = {row["request_id"]: row for row in store.rows(asked[0])}
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for row in store.rows(asked[1]):
        spans[row["request_id"]].append((row["start_ns"], row["end_ns"], row["cause"]))
    assert set(rows) == set(by_base)
    differing = []
    for name, row in rows.items():
        if not row["walked"]:
            assert row["unwalked"]
            assert all(row[key] is None for key in row if key.endswith("_ns"))
            assert name not in spans
            continue
        (answer,) = by_base[name]
        wanted = expected(answer)
        found = {key: row[key] for key in wanted}
        path = path_of([(s.start_ns, s.end_ns, s.cause) for s in answer.segments])
        if found != wanted or path_of(spans[name]) != path:
            differing.append((name, {k: (found[k], v) for k, v in wanted.items() if found[k] != v}, path, spans[name]))
    assert differing == []
    return sum(row["walked"] for row in rows.values()) / len(rows)


def path_ms(
    tmp_path: Path, trace: Trace, since: float, until: float, shape: Shape = ONE
) -> list[tuple[float, float, str]]:
    """Return what SQL says of the only request's path from one time to another; both engines agree on all of it."""
    made = Scene(random.Random(0), 0, shape=shape)
    made.rows = processes(made)
    made.events = sorted(trace.events)
    with stored(tmp_path / "one.duckdb", [made]) as store:
        assert compare(store) == 1
        rows = store.rows("FROM walk_segment ORDER BY start_ns")
    path = path_of([(max(row["start_ns"], ns(since)), min(row["end_ns"], ns(until)), row["cause"]) for row in rows])
    return [((a - ns(0)) / MS, (b - ns(0)) / MS, cause) for a, b, cause in path if a < b]
