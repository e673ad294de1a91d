"""Two engines of attribution, one answer: SQL says of a request what the reference walk says, to the nanosecond.

SQL may decline a request, with a reason, and then gives no number at all; how many it may decline is part of the test.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from kvtrace import assemble, attribution, critical_path, schema, stages
from kvtrace.analyze import load_events, load_processes
from kvtrace.errors import UsageError
from kvtrace.model import Attribution, Event
from kvtrace.schema.walk import answers
from kvtrace.store import Store
from kvtrace.testing import Fleet, fill
from tests.dashboards import tools
from tests.field.test_host_buffer import loaded, saved
from tests.trace import MS, D, P, Trace, ns, pull, push
from tests.walk_scenes import Scene, processes, scene

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SCENES, REQUESTS = 56, 40
SEED = 7
ANSWERED_LEAST = 0.6
"""The share of these untidy requests that SQL answers at least."""
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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with filled(tmp_path_factory.mktemp("walk") / "many.duckdb", range(SCENES), REQUESTS) as store:
        yield store


def test_both_engines_agree_on_random_deployments(many: Store) -> None:
    """2,240 requests of 56 deployments: points missing, doubled, displaced, several ranks, push and pull."""
    assert compare(many) >= ANSWERED_LEAST


@pytest.mark.parametrize(
    ("sql", "least"),
    [
        ("stage IN ('prefill.enqueued', 'decode.enqueued') AND d >= 1000000 GROUP BY ALL", 0.5),
        ("stage IN ('prefill.scheduled', 'decode.scheduled') GROUP BY ALL HAVING count(*) > 1", 0.1),
    ],
    ids=("queue", "steps"),
)
def test_what_load_brings_is_answered(many: Store, sql: str, least: float) -> None:
    """Waits in a core's queue and several own steps are no reason to decline, even of requests as untidy as these."""
    rows = many.rows(
        f"""FROM walk_request SEMI JOIN (SELECT DISTINCT regexp_extract(request, 's[0-9]+-[0-9]+') AS request_id
  FROM (SELECT request FROM event WHERE {sql})) USING (request_id)"""  # noqa: S608 -- from above
    )

    assert len(rows) >= 100
    assert sum(row["walked"] for row in rows) / len(rows) >= least


def test_handshakes_are_answered(many: Store) -> None:
    (row,) = many.rows("SELECT count(DISTINCT request_id) AS n FROM walk_segment WHERE cause = 'handshake'")

    assert row["n"] >= 20


@pytest.mark.parametrize("seed", range(4))
def test_both_engines_agree_on_random_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Graphs of which random edges are gone, so that farther ancestors have to stand in."""
    rng = random.Random(seed)
    edges = [edge for edge in stages.EDGES if rng.random() > 0.15]
    incoming = {
        name: tuple(edge for edge in edges if edge.after.name == name) for name in {edge.after.name for edge in edges}
    }
    monkeypatch.setattr(critical_path, "_INCOMING", incoming)
    with filled(tmp_path / "graph.duckdb", range(100 + 4 * seed, 104 + 4 * seed), 25) as store:
        assert compare(store, edges) >= ANSWERED_LEAST / 2


@pytest.mark.parametrize(
    "given", [{"requests": -1}, {"pairs": 0}, {"per_s": 0.0}, {"push_share": 1.5}, {"odd_share": float("nan")}], ids=str
)
def test_a_fleet_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    (name,) = given

    with pytest.raises(UsageError, match=f"a fleet's {name} is"):
        Fleet(**{"requests": 1, **given})


def test_both_engines_agree_on_a_fleet(tmp_path: Path) -> None:
    """The traffic that the benchmarks use: SQL answers nearly all of it."""
    with Store.open(tmp_path / "fleet.duckdb", "write") as store:
        fill(store, Fleet(700, seed=3, odd_share=0.2, http=True))

        assert compare(store) >= 0.95


def _ended_early(name: str) -> Trace:
    trace = push(name=name)
    trace.events = [
        event._replace(t_ns=ns(31.2)) if (event.stage, event.a) == ("step.ended", 2) else event
        for event in trace.events
    ]
    return trace


def _held_up(trace: Trace, name: str, at_ms: float, enqueued: stages.Stage, considered: stages.Stage) -> Trace:
    """Return the hand-off as it waits 20 ms longer in that queue, behind one that is looked at in vain."""
    held = trace.shifted(at_ms + 0.5, 20)
    return held.at(at_ms - 0.5, enqueued, name, 9).at(at_ms + 2, considered, name)


def _carrying(name: str, trace: Trace) -> Trace:
    """Return the hand-off as of legs that were sent one transfer_id."""
    trace.at(3.6, stages.PREFILL_ALLOCATED, f"cmpl-{name}-0-aaaaaaaa", 38)
    trace.events = [e._replace(ref=f"transfer-{name}") if e.stage.endswith(".allocated") else e for e in trace.events]
    return trace


def _written_for(name: str, other: str) -> Trace:
    trace = push(name=name)
    trace.events = [
        event._replace(ref=other) if event.stage == "transfer.prepared" else event for event in trace.events
    ]
    return trace


def _one_of_several() -> Iterator[tuple[str, Trace, int, str | None]]:
    """Yield (name, hand-off, ranks, why it is not walked): one rank, step or look of several is the one that counts."""
    d = "cmpl-{}-0-bbbbbbbb".format
    yield "again", push(name="again").step(P, 1, (-30, -29, -20, -19, -18)).step(P, 1, (90, 91, 95, 96, 97)), 1, None
    yield "begun", push(name="begun").at(90, stages.STEP_SCHEDULED, "", 1, 5, 1, process=P), 1, None
    yield "own", push(name="own").at(44.5, stages.REPORTED, d("own")), 2, None
    yield "write", push(name="write").at(44.5, stages.REPORTED, d("write"), 1, process=D + 10), 2, "several ranks"
    yield "read", pull("read").at(44.5, stages.REPORTED, d("read"), 1, process=D + 10), 2, "several ranks"
    yield "told", push(name="told").at(41, stages.NOTIFIED, d("told"), 1), 2, "several transfers"
    yield "others", _written_for("others", d("nobody")), 1, "several transfers"
    p = _held_up(push(name="p"), "cmpl-q-0-aaaaaaaa", 3, stages.PREFILL_ENQUEUED, stages.PREFILL_CONSIDERED)
    yield "p", p, 1, "blocks"
    yield (
        "d",
        _held_up(pull("d"), "cmpl-e-0-bbbbbbbb", 36, stages.DECODE_ENQUEUED, stages.DECODE_CONSIDERED),
        1,
        "blocks",
    )
    yield "sent", _carrying("sent", push(name="sent")), 1, None
    yield "unmatched", _carrying("unmatched", push(name="unmatched").without("transfer.matched")), 1, None
    yield "early", _ended_early("early"), 1, "a step that ended before it began"
    yield "saved", saved(push(name="saved"), "saved"), 1, "copies through a host buffer"
    yield "loaded", loaded(pull("loaded"), "loaded"), 1, "copies through a host buffer"


def test_what_sql_answers_and_what_it_leaves(tmp_path: Path) -> None:
    """Where the reference looks at one rank, step or queue of several, SQL does so too or says why it does not."""
    scenes, wanted = [], {}
    for number, (name, trace, ranks, unwalked) in enumerate(_one_of_several()):
        made = Scene(random.Random(0), number, ranks=ranks)
        made.rows = processes(made)
        made.events = [event._replace(process=event.process + made.first_process) for event in sorted(trace.events)]
        scenes.append(made)
        wanted[name] = unwalked
    with stored(tmp_path / "several.duckdb", scenes) as store:
        compare(store)
        rows = store.rows("FROM walk_request")

    assert {row["request_id"]: row["unwalked"] for row in rows if row["request_id"] in wanted} == wanted


def _path_ms(tmp_path: Path, trace: Trace, since: float, until: float) -> list[tuple[float, float, str]]:
    """Return what SQL says of the only request's path from one time to another; both engines agree on all of it."""
    made = Scene(random.Random(0), 0)
    made.rows = processes(made)
    made.events = sorted(trace.events)
    with stored(tmp_path / "one.duckdb", [made]) as store:
        assert compare(store) == 1
        rows = store.rows("FROM walk_segment ORDER BY start_ns")
    path = path_of([(max(row["start_ns"], ns(since)), min(row["end_ns"], ns(until)), row["cause"]) for row in rows])
    return [((a - ns(0)) / MS, (b - ns(0)) / MS, cause) for a, b, cause in path if a < b]


def _queued(trace: Trace, side: str, for_ms: float) -> Trace:
    trace.events = [e._replace(d=round(for_ms * MS)) if e.stage == f"{side}.enqueued" else e for e in trace.events]
    return trace


@pytest.mark.parametrize(
    ("starved_ms", "turn_ms"), [(0, 13), (2, 15), (40, 18)], ids=("processor", "starved", "starved for long")
)
def test_a_wait_in_a_queue_divides_by_the_steps_meanwhile(tmp_path: Path, starved_ms: float, turn_ms: float) -> None:
    """Arrived at 2 and in the core's queue since 8; one step runs to 12, the next 18..21; taken in at 23."""
    trace = _queued(push().shifted(2.5, 20), "prefill", 15)
    trace.step(P, 90, (1, 2, 10, 11, 12)).step(P, 91, (18, 18, 20, 20, 21))
    trace.events = [
        e._replace(b=round(starved_ms * MS)) if (e.stage, e.a) == ("step.ended", 91) else e for e in trace.events
    ]

    idle = [(turn_ms, 18, "unattributed")] if turn_ms < 18 else []
    boundary = [(8, turn_ms, "prefill.step_boundary"), *idle, (18, 22, "prefill.step_boundary")]
    assert _path_ms(tmp_path, trace, 2, 23) == path_of(
        [(2, 8, "prefill.frontend"), *boundary, (22, 23, "unattributed")]  # type: ignore[list-item]
    )


@pytest.mark.parametrize(
    ("in_queue_ms", "parts"),
    [
        (0.999999, [(35, 36.5, "decode.frontend")]),
        (1, [(35, 35.5, "decode.frontend"), (35.5, 36.5, "decode.step_boundary")]),
        (5, [(35, 36, "decode.step_boundary"), (36, 36.5, "unattributed")]),
    ],
    ids=("a nanosecond less", "a millisecond", "longer than all of it"),
)
def test_a_wait_in_a_queue_counts_from_a_millisecond_on(
    tmp_path: Path, in_queue_ms: float, parts: list[tuple[float, float, str]]
) -> None:
    """D's front end has the leg at 35, its scheduler at 36.5; D runs no step then."""
    trace = _queued(pull().shifted(35.9, 0.5), "decode", in_queue_ms)

    assert _path_ms(tmp_path, trace, 35, 36.5) == parts


def test_chunks_of_a_prompt_are_the_steps_that_work_on_it(tmp_path: Path) -> None:
    """Two steps, 4..15 and 16..31, with the scheduler's turn between them, and the connector ahead of the second."""
    trace = push()
    trace.events = [e for e in trace.events if (e.process, e.a) != (P, 1) or e.request or "step" not in e.stage]
    trace.events = [e for e in trace.events if e.stage != "prefill.scheduled"]
    p = "cmpl-r1-0-aaaaaaaa"
    trace.step(P, 0, (4, 10, 14, 14.5, 15), tokens=300).at(4, stages.PREFILL_SCHEDULED, p, 0, 300, 0, 600)
    trace.step(P, 1, (16, 17, 30, 30.5, 31), tokens=300, connector_ms=2, before_ms=2)
    trace.at(16, stages.PREFILL_SCHEDULED, p, 1, 300, 300, 600)

    assert _path_ms(tmp_path, trace, 3, 31) == [
        (3, 4, "prefill.step_boundary"), (4, 10, "prefill.launch"), (10, 14, "prefill.forward"),
        (14, 15, "prefill.sample"), (15, 16, "prefill.others"), (16, 17, "prefill.launch"),
        (17, 19, "step.connector"), (19, 30, "prefill.forward"), (30, 31, "prefill.sample"),
    ]  # fmt: skip


def test_a_handshake_takes_its_part_of_preparing(tmp_path: Path) -> None:
    """P prepares from 35 to 45.5, and shakes hands from 37 to 41, for the first millisecond with another engine."""
    trace = push().shifted(35.2, 10)
    for t_ms, stage, ref in (
        (36.5, stages.HANDSHAKE_STARTED, "d9"), (38, stages.HANDSHAKE_ENDED, "d9"),
        (38, stages.HANDSHAKE_STARTED, "d0"), (41, stages.HANDSHAKE_ENDED, "d0"),
    ):  # fmt: skip
        trace.at(t_ms, stage, process=P, ref=ref)

    assert _path_ms(tmp_path, trace, 35, 45.5) == [
        (35, 36.5, "prepare"), (36.5, 41, "handshake"), (41, 45.5, "prepare")
    ]  # fmt: skip


def test_legs_of_other_ids_with_one_transfer_are_left(tmp_path: Path) -> None:
    """The reference joins them, so that SQL, which goes by ids, has no answer; under transfers of their own it has."""
    told = []
    for one in ("transfer-p", "transfer-d"):
        made = Scene(random.Random(0), 0)
        made.rows = processes(made)
        p, d = (_carrying(name, push(name=name)).events for name in ("p", "d"))
        legs_of_both = [
            *(e for e in p if e.request.startswith("cmpl-p-0-a")),
            *(e._replace(ref=one) if e.ref == "transfer-d" else e for e in d if e.request.startswith("cmpl-d-0-b")),
        ]
        kept = [e for e in legs_of_both if e.stage != "transfer.matched" and not e.ref.startswith(("cmpl", "d"))]
        made.events = [event._replace(process=event.process + made.first_process) for event in sorted(kept)]
        with stored(tmp_path / f"{one}.duckdb", [made]) as store:
            told.append((len(reference(store)), {row["unwalked"] for row in store.rows("FROM walk_request")}))

    assert told == [(1, {"ids that lead to other requests"}), (2, {None})]


def test_the_views_answer_where_a_store_is_one_of_several(many: Store, tmp_path: Path) -> None:
    """Attached under a name, they read that store's tables and none of those beside it."""
    path = tmp_path / "copy.duckdb"
    many.publish(path)
    ask = "SELECT count(*), sum(coordination_ns)::BIGINT FROM {}walk_request"
    with Store.open(tmp_path / "other.duckdb", "write") as store:
        store.execute(f"ATTACH {schema.text(str(path))} AS far (READ_ONLY)")

        assert store.select(ask.format("far.")).values == many.select(ask.format("")).values
        assert store.select(ask.format("")).values == [(0, None)]


@pytest.mark.dashboards
def test_duckdb_1_reads_the_views_as_duckdb_2_does(many: Store, tmp_path: Path) -> None:
    path = tmp_path / "copy.duckdb"
    many.publish(path)
    asked = ["SELECT * FROM walk_request ORDER BY ALL", "SELECT * FROM walk_segment ORDER BY ALL"]
    code = """
import json, sys, duckdb
assert duckdb.__version__.startswith("1.5."), duckdb.__version__
connection = duckdb.connect(sys.argv[1], read_only=True)
connection.execute("SET enable_progress_bar = false")
print(json.dumps([connection.execute(sql).fetchall() for sql in sys.argv[2:]]))
"""
    done = subprocess.run(
        [tools.old_duckdb_python(), "-c", code, str(path), *asked], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[list(row) for row in many.select(sql).values] for sql in asked]


def test_a_fleet_is_the_same_every_time(tmp_path: Path) -> None:
    """One seed, one list of events; another seed, another."""
    found = []
    for seed in (1, 1, 2):
        with Store.open(tmp_path / f"{len(found)}.duckdb", "write") as store:
            fill(store, Fleet(200, seed=seed))
            found.append(store.rows("SELECT count(*) AS n, sum(hash(event))::VARCHAR AS print FROM event"))

    assert found[0] == found[1]
    assert found[0] != found[2]
