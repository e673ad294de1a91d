"""Random deployments and traffic, far untidier than real ones, on which both engines of attribution have to agree."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtrace import stages
from kvtrace.division import EMPTY_TURN_NS, INTAKE_NS, TURN_NS
from kvtrace.model import Event
from tests.trace import MS, D, P, Trace, pull, push
from tests.walk_ranks import ONE, RANK_SPACING, Shape, of_other_ranks, shape_of, workers

_SPACING = 100
"""Processes of two scenes are so many numbers apart."""
_ALWAYS = ("step.scheduled", "decode.enqueued")
_ADDED = (stages.WORKER_STARVED, stages.RESULT_STARVED, stages.POST_STARVED, stages.NOTICE_STARVED)
"""Stages of which a scene's events get some at the end, so that what else happens is what it was without them."""


@dataclass
class Scene:
    """A pair of engines and a router of their own, their processes as rows, and all their events."""

    rng: random.Random
    number: int
    ranks: int = 1
    connecting: random.Random = field(default_factory=random.Random)
    """Of its own, so that what else happens is what it was without it."""
    shape: Shape = ONE
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def first_process(self) -> int:
        """Return what is added to the process numbers of `tests.trace`."""
        return _SPACING * self.number


def scene(number: int, requests: int, seed: int) -> Scene:
    """Return a scene in which some points are never recorded and others get lost, doubled and displaced."""
    rng = random.Random(f"{seed}/{number}")
    made = Scene(rng, number, rng.choice((1, 1, 1, 2)), random.Random(f"{seed}/{number}/connector"))
    made.shape = shape_of(f"{seed}/{number}/ranks")
    made.rows = processes(made)
    gap_ms = rng.choice((15, 40, 120, 400))
    absent = {
        stage.name
        for stage in stages.STAGES
        if stage not in _ADDED and rng.random() < rng.choice((0, 0, 0.05)) and stage.name not in _ALWAYS
    }
    at_ms = 0.0
    for index in range(requests):
        at_ms += rng.expovariate(1 / gap_ms)
        trace = _request(made, index)
        made.events += _chunked(_renumbered(made, trace.later(round(at_ms, 3), 20 * (index + 1))))
    made.events += _beside(made, at_ms)
    made.events = [event for event in made.events if event.stage not in absent]
    _spoil(made)
    # Behind the rest, which is what it was without it.
    made.events += list(of_other_ranks(made.events, made.shape, made.first_process, random.Random(f"{seed}/{number}")))
    made.events += list(_without_processor(made))
    made.events = list(_queued(made))
    made.events += list(_shaken(made))
    made.events = list(_ordered(made))
    made.events.sort()
    return made


def _request(made: Scene, index: int) -> Trace:  # noqa: C901, PLR0912 -- a list of what may happen
    """Return one request's events: a tidy push or pull, then something that happens to requests."""
    rng = made.rng
    name = f"s{made.number}-{index:03}"
    trace = push(rng.uniform(3.6, 60), name) if rng.random() < 0.5 else pull(name, rng.uniform(1, 30))
    p, d = f"cmpl-{name}-0-aaaaaaaa", f"cmpl-{name}-0-bbbbbbbb"
    for from_ms, by_ms in ((rng.uniform(0, 60), rng.expovariate(1 / 10)) for _ in range(rng.choice((0, 1, 3)))):
        trace = trace.shifted(from_ms, by_ms)
    if made.connecting.random() < 0.2:
        ahead_ns, took_ns = (int(made.connecting.expovariate(1 / 4) * MS) for _ in range(2))
        trace.events = [
            event._replace(c=ahead_ns + took_ns, d=ahead_ns) if event.stage == "step.connected" else event
            for event in trace.events
        ]
    trace.events = _starved(made, trace.events)
    happened = rng.random()
    if happened < 0.06:
        trace.at(rng.uniform(20, 60), stages.DECODE_ABORTED, d).at(rng.uniform(20, 60), stages.ROUTER_CANCELLED, name)
    elif happened < 0.10:
        trace = trace.without("decode.ready", "decode.reported")
    elif happened < 0.13:
        trace.at(rng.uniform(20, 60), stages.LOAD_FAILED, d, 0, 38)
    elif happened < 0.16:
        trace.at(rng.uniform(20, 60), stages.TRANSFER_FAILED, p, 7, ref="broken", process=P)
    elif happened < 0.19:
        trace.events = [event._replace(c=0) if event.stage == "decode.enqueued" else event for event in trace.events]
        trace = trace.without("transfer.prepared", "transfer.post_started", "transfer.post_ended", "transfer.done")
    elif happened < 0.24:
        for stage, leg in ((stages.PREFILL_CONSIDERED, p), (stages.DECODE_CONSIDERED, d)):
            trace.at(rng.uniform(2, 50), stage, leg, 0, 599)
        trace.at(rng.uniform(2, 50), stages.PREFILL_ALLOCATED, p, 38)
    elif happened < 0.27:
        trace.at(0, stages.ROUTER_RECEIVED, name, ref=f"client-{made.number}-{rng.randrange(4)}")
    elif happened < 0.30:
        trace.at(14, stages.PREFILL_SCHEDULED, p, 1, 300, 300, 600)
    elif happened < 0.34:
        trace = _whole_ids(trace, f"cmpl-{name}-0")
    elif happened < 0.37:
        trace.events = [event for event in trace.events if not event.stage.startswith("router.")]
    elif happened < 0.40:
        trace.at(rng.uniform(2, 40), stages.DECODE_ENQUEUED, d, 600, 0, 1, ref=p)
    elif happened < 0.405:
        for stage in (stages.HANDSHAKE_STARTED, stages.HANDSHAKE_ENDED):
            trace.at(rng.uniform(30, 45), stage, "", 0, 1, process=P, ref=f"d{made.number}")
    elif happened < 0.46:
        trace.at(rng.uniform(44, 60), stages.REPORTED, d).at(rng.uniform(40, 60), stages.NOTIFIED, d)
    elif happened < 0.50 and made.ranks > 1:
        trace.at(rng.uniform(44, 60), stages.REPORTED, d, 1, process=D + 10)
    elif happened < 0.54:
        trace.at(rng.uniform(39, 45), stages.PROBED, p if "sender.picked" in {e.stage for e in trace.events} else d, 7)
    return trace


def _starved(made: Scene, events: list[Event]) -> list[Event]:
    """Return the events of steps whose scheduler, now and then, had no processor before one."""
    rng = random.Random(f"{made.number}-{len(events)}")
    return [
        event._replace(b=int(rng.expovariate(1 / 5) * MS))
        if event.stage == "step.ended" and rng.random() < 0.3
        else event
        for event in events
    ]


def _without_processor(made: Scene) -> Iterator[Event]:
    """Yield what workers say that had no processor in a step, for longer now and then than the step allows."""
    rng = random.Random(f"{made.number}-{len(made.events)}-worker")
    for event in made.events:
        if event.stage == "step.ended" and rng.random() < 0.2:
            result_ns = int(rng.expovariate(1 / 2) * MS)
            yield event._replace(stage=stages.RESULT_STARVED.name, b=0, c=result_ns, d=0)
        elif event.stage == "step.connected" and rng.random() < 0.3:
            forward_ns, connector_ns = (int(rng.expovariate(1 / by_ms) * MS) for by_ms in (6, 0.4))
            yield event._replace(stage=stages.WORKER_STARVED.name, c=forward_ns, d=connector_ns)
        elif event.stage == "transfer.post_ended" and rng.random() < 0.3:
            starved_ns = int(rng.expovariate(1 / 0.7) * MS)
            yield event._replace(stage=stages.POST_STARVED.name, b=starved_ns, c=0, d=0)
        elif (
            event.stage in ("transfer.done", "transfer.notified")
            and (event.process - made.first_process) % RANK_SPACING == D
            and rng.random() < 0.3
        ):
            starved_ns, longer_ns = (int(rng.expovariate(1 / by_ms) * MS) for by_ms in (1, 2))
            yield event._replace(
                stage=stages.NOTICE_STARVED.name, a=0, b=starved_ns, c=starved_ns + longer_ns, d=0, ref=""
            )


def _ordered(made: Scene) -> Iterator[Event]:
    """Yield the events, some cores having told workers late to sample, or before their connectors were through.

    Some schedulers took long to give blocks, whether the look that led to them was recorded or not.
    """
    rng = random.Random(f"{made.number}-{len(made.events)}-order")
    for event in made.events:
        how_often, by_ms = {
            "step.ended": (0.4, 1.5), "prefill.allocated": (0.5, 8), "decode.allocated": (0.04, 8),
        }.get(event.stage, (0, 1))  # fmt: skip
        is_told = rng.random() < how_often
        yield event._replace(c=int(rng.expovariate(1 / by_ms) * MS)) if is_told else event


def _queued(made: Scene) -> Iterator[Event]:
    """Yield the events, some requests having waited in a core's queue: for exactly a threshold, from exactly a step's
    begin or end or that of the turn behind it, or for any time.
    """  # noqa: D205
    rng = random.Random(f"{made.number}-{len(made.events)}-queue")
    around = sorted(e.t_ns for e in made.events if e.stage in ("step.scheduled", "step.ended"))
    for event in made.events:
        if not event.stage.endswith(".enqueued") or rng.random() < 0.6:
            yield event
            continue
        before = around[max(0, bisect_left(around, event.t_ns) - rng.randrange(1, 9))]
        since_ns = before + rng.choice((-1, 0, 1, TURN_NS, EMPTY_TURN_NS))
        waited_ns = (INTAKE_NS - 1, INTAKE_NS, event.t_ns - since_ns, int(rng.expovariate(1 / 8) * MS))
        yield event._replace(d=max(0, rng.choice(waited_ns)))


def _shaken(made: Scene) -> Iterator[Event]:
    """Yield handshakes around the time at which a transfer was prepared: with its peer or another, by any worker."""
    rng = random.Random(f"{made.number}-{len(made.events)}-hands")
    for event in made.events:
        if event.stage not in ("transfer.prepared", "decode.load_failed") or rng.random() < 1 - 0.05 / made.shape.moves:
            continue
        at_ns = event.t_ns
        for _ in range(rng.randrange(1, 4)):
            at_ns -= int(rng.choice((0, 0.3, rng.expovariate(1 / 5))) * MS)
            ref = f"{rng.choice('pddd' if event.process - made.first_process == P else 'pppd')}{made.number}"
            process = rng.choice((event.process, event.process, event.process + 3))
            blank = event._replace(
                process=process, request="", ref=rng.choice((ref, ref, "elsewhere")), a=0, b=0, c=0, d=0
            )
            yield blank._replace(t_ns=at_ns, stage=stages.HANDSHAKE_STARTED.name)
            if rng.random() < 0.998:
                took_ns = int(rng.choice((0.3, rng.expovariate(1 / 3))) * MS)
                yield blank._replace(t_ns=at_ns + took_ns, stage=stages.HANDSHAKE_ENDED.name)


def _chunked(events: list[Event]) -> list[Event]:
    """Return a request's events, now and then with several steps in place of its one on P or on D.

    They follow each other at once, after exactly a turn, a moment more, or before the one before it is over.
    """
    rng = random.Random(f"{events[0].t_ns}-{len(events)}")
    made = [e for e in events if e.stage in ("prefill.scheduled", "decode.scheduled")]
    if not made or rng.random() < 0.93:
        return events
    own = rng.choice(made)
    step = [e for e in events if e.stage.startswith("step.") and (e.a, e.process) == (own.a, own.process)]
    stamped = {event.stage: event for event in step}
    if len(stamped) < len(step) or len(step) < 5:
        return events
    chunks, begin, end = rng.randrange(2, 5), stamped["step.scheduled"], stamped["step.ended"]
    width_ns, size = (end.t_ns - begin.t_ns) // chunks, own.d // chunks
    kept = [event for event in events if event is not own and event not in step]
    at_ns = begin.t_ns
    for number in range(chunks):
        is_last = number == chunks - 1
        a, tokens = own.a - chunks + 1 + number, own.d - number * size if is_last else size
        kept.append(own._replace(t_ns=at_ns, a=a, b=tokens, c=number * size))
        kept.append(begin._replace(t_ns=at_ns, a=a, b=rng.choice((tokens, tokens, 0))))
        parts = sorted(rng.choices((0, 0.1, 0.3, 0.5, 0.7, 0.9), k=4))
        for stage, part in zip(("started", "forwarded", "connected", "ended"), parts, strict=True):
            event = stamped[f"step.{stage}"]
            if stage == "connected" and rng.random() < 0.3:
                event = event._replace(c=width_ns // 2, d=width_ns // rng.choice((5, 20)))
            is_kept = is_last and stage != "started"
            kept.append(event._replace(a=a, t_ns=event.t_ns if is_kept else at_ns + int(part * width_ns)))
        over_ns = at_ns + int(parts[3] * width_ns)
        gap_ns = rng.choice((0, 0, 1, TURN_NS, TURN_NS + 1, -width_ns // 4, width_ns // 5))
        if rng.random() < 0.05:
            kept.append(begin._replace(t_ns=over_ns + 13, a=own.a - 10))
        at_ns = max(at_ns + 1, over_ns + gap_ns)
    return kept


def _whole_ids(trace: Trace, name: str) -> Trace:
    """Return a copy as of engines whose random suffix is off: both legs bear one id."""
    copy = Trace()
    copy.events = [
        event._replace(**{key: name for key in ("request", "ref") if getattr(event, key).startswith("cmpl-")})
        for event in trace.events
    ]
    return copy


def _renumbered(made: Scene, trace: Trace) -> list[Event]:
    """Return the events with the scene's processes, a transfer number a request, and times that are not round.

    What was stamped once for several points, as a step and who is in it, remains at one moment.
    """
    number, strayed = made.rng.randrange(10**9), defaultdict[int, int](lambda: made.rng.randrange(1000))
    return [
        event._replace(
            process=event.process + made.first_process,
            t_ns=event.t_ns + strayed[event.t_ns],
            a=number if event.stage.startswith("transfer.") and event.a == 7 else event.a,
        )
        for event in trace.events
    ]


def _beside(made: Scene, until_ms: float) -> list[Event]:
    """Return what the engines do for others: steps with and without tokens, sender threads that wake and sleep."""
    rng, trace, at_ms = made.rng, Trace(), 0.0
    number = 100_000
    while at_ms < until_ms:
        at_ms += rng.expovariate(1 / 60)
        number += 1
        took = rng.uniform(0.5, 25)
        times = (at_ms, at_ms + took / 10, at_ms + took / 2, at_ms + took * 0.8, at_ms + took)
        trace.step(rng.choice((P, D)), number, times, tokens=rng.choice((0, 16, 700)))
        trace.at(at_ms, rng.choice((stages.SENDER_WOKE, stages.SENDER_SLEPT)), process=P)
    trace.events = _starved(made, trace.events)
    return _renumbered(made, trace)


def _spoil(made: Scene) -> None:
    """Lose, double and displace events, more in some scenes than in others."""
    rng = made.rng
    share = rng.choice((0.0, 0.002, 0.01, 0.03))
    kept: list[Event] = []
    for event in made.events:
        fate = rng.random()
        if fate < share:
            continue
        if fate < 3 * share:
            event = event._replace(t_ns=event.t_ns + int(rng.gauss(0, 6) * MS))  # noqa: PLW2901 -- the displaced one
        kept.append(event)
        if fate > 1 - share:
            kept.append(event._replace(t_ns=event.t_ns + int(rng.expovariate(1 / 5) * MS)))
    made.events = kept


def processes(made: Scene) -> list[dict[str, Any]]:
    """Return the rows of table process for a scene."""
    facts: dict[int, dict[str, str]] = {
        1: {"kind": "router"}, 4: {"kind": "api"}, 5: {"kind": "api"},
        2: {"kind": "core", "engine_id": f"p{made.number}"}, 3: {"kind": "core", "engine_id": f"d{made.number}"},
    }  # fmt: skip
    if made.ranks > 1 and made.shape == ONE:
        facts[2]["tp_size"] = facts[3]["tp_size"] = "2"
        facts[D + 10] = {"kind": "worker", "engine_id": f"d{made.number}", "tp_size": "2"}
    parents = {2: 4, 3: 5, D + 10: 3}
    for worker, (core, width) in workers(made.shape).items():
        facts[core]["tp_size"] = str(width)
        facts[worker] = facts[core] | {"kind": "worker"}
        parents[worker] = core
    first = made.first_process
    return [
        {
            "process": first + number, "series": f"s{first + number}", "host": "host-a", "domain": "boot-1",
            "pid": first + number, "parent_pid": first + parents[number] if number in parents else 0,
            "offset_ns": 0, "lost_records": 0, "facts": list(said.items()),
        }
        for number, said in facts.items()
    ]  # fmt: skip
