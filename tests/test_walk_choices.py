"""What the walk in SQL answers and what it leaves to the reference, with which reason."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvtrace import stages
from tests.field.test_host_buffer import loaded, saved
from tests.trace import D, P, Trace, ns, pull, push
from tests.walk_compare import compare, reference, stored
from tests.walk_scenes import Scene, processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
    yield "write", push(name="write").at(44.5, stages.REPORTED, d("write"), 1, process=D + 10), 2, None
    yield "read", pull("read").at(44.5, stages.REPORTED, d("read"), 1, process=D + 10), 2, None
    yield "told", push(name="told").at(41, stages.NOTIFIED, d("told"), 1), 2, None
    yield "others", _written_for("others", d("nobody")), 1, None
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


def test_bytes_below_nothing_are_of_one_size_in_both(tmp_path: Path) -> None:
    """A damaged amount of bytes: the fastest of its pair and size is the fastest for both engines of attribution."""
    made = Scene(random.Random(0), 0)
    made.rows = processes(made)
    for number, (moved_bytes, by_ms) in enumerate(((-1, 0), (1, 20), (-(1 << 40), 5))):
        trace = pull(f"r{number}").shifted(44.5, by_ms)
        trace.events = [e._replace(b=moved_bytes) if e.stage == "transfer.post_ended" else e for e in trace.events]
        made.events += trace.later(500 * number, 20 * (number + 1)).events

    with stored(tmp_path / "run.duckdb", [made]) as store:
        assert compare(store) == 1
