"""What else was going on in an engine: its steps, sender threads, posts and handshakes, who held its KV blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from kvtrace import looks, occupancy, stages
from kvtrace.model import NEVER_NS, Awake, Event, Handshake, Limits, Look, Posted, Process, Step
from kvtrace.occupancy import Occupancy


class Timeline:
    """The steps of one engine in order, the sender threads of its workers, its handshakes, its blocks, its limits."""

    def __init__(
        self,
        steps: Iterable[Step] = (),
        senders: Mapping[int, list[Awake]] | None = None,
        handshakes: Iterable[Handshake] = (),
        held: Occupancy | None = None,
        vain: Iterable[Look] = (),
        limits: Limits | None = None,
    ) -> None:
        self.steps = sorted(steps, key=lambda step: step.scheduled_ns)
        for position, following in enumerate(self.steps[1:]):
            if following.starved_ns:
                self.steps[position] = replace(self.steps[position], starved_after_ns=following.starved_ns)
        self._made = {(step.step, step.scheduled_ns): step for step in self.steps}
        self.senders = dict(senders or {})
        self.handshakes = sorted(handshakes)
        self.occupancy = held or Occupancy()
        self.limits = limits or Limits()
        self._vain = sorted(vain)
        self.has_ranks = any(step.ranks for step in self.steps)
        self._scheduled = [step.scheduled_ns for step in self.steps]

    def made(self, number: int, at_ns: int) -> Step | None:
        """Return the step of that number made up at that very time, None if it was not seen.

        What names a step bears the time at which it was made up, and numbers begin anew with an engine's process.
        """
        return self._made.get((number, at_ns))

    def between(self, start_ns: int, end_ns: int) -> list[Step]:
        """Return the steps made up in [start_ns, end_ns), but for those that seem to have ended before they were.

        Such a one is the beginning and the end of two steps of one number, and has no time that is known.
        """
        first, last = bisect_left(self._scheduled, start_ns), bisect_left(self._scheduled, end_ns)
        return [step for step in self.steps[first:last] if not 0 < step.ended_ns < step.scheduled_ns]

    def running(self, at_ns: int) -> Step | None:
        """Return the last step made up at or before `at_ns` that had not ended then, None if there was none."""
        position = bisect_right(self._scheduled, at_ns) - 1
        for step in reversed(self.steps[max(0, position - 1) : position + 1]):
            if step.scheduled_ns <= at_ns < step_end_ns(step):
                return step
        return None

    def forwarded_in(self, start_ns: int, end_ns: int) -> Step | None:
        """Return the step that a worker had begun by `start_ns` and whose forward ended in (start_ns, end_ns), if any.

        Of such, the last: a device works on what it was given in order.
        """
        first, last = bisect_left(self._scheduled, start_ns), bisect_left(self._scheduled, end_ns)
        for step in reversed(self.steps[max(0, first - 2) : last]):
            if 0 < step.started_ns <= start_ns < step.forwarded_ns <= end_ns:
                return step
        return None

    def before(self, at_ns: int) -> Step | None:
        """Return the last step made up at or before `at_ns`, None if there was none."""
        position = bisect_right(self._scheduled, at_ns) - 1
        return self.steps[position] if position >= 0 else None

    def idle_ns(self, at_ns: int) -> int | None:
        """Return for how long no step had run at `at_ns`, in ns; None before the first step."""
        position = bisect_right(self._scheduled, at_ns) - 1
        if position < 0:
            return None
        return max(0, at_ns - max(step_end_ns(step) for step in self.steps[max(0, position - 1) : position + 1]))

    def vain_looks(self, enqueued_ns: int, until_ns: int) -> list[int]:
        """Return when the scheduler looked in vain at a request that came no later than `enqueued_ns`, in order.

        It takes requests in their order, so those behind one that gets no blocks are not looked at.
        """
        first, last = bisect_left(self._vain, (enqueued_ns,)), bisect_left(self._vain, (until_ns,))
        return [look.t_ns for look in self._vain[first:last] if look.enqueued_ns <= enqueued_ns]

    @property
    def last_ns(self) -> int:
        """Return when its last step was over, unix ns; 0 without steps."""
        return step_end_ns(self.steps[-1]) if self.steps else 0

    def sender(self, process: int) -> list[Awake]:
        """Return when that worker's sender thread was awake, in order."""
        return self.senders.get(process, [])


NOTHING = Timeline()
"""What is known of an engine of which nothing is known."""


class Posts:
    """The calls by which one process posted transfers, in order. Threads may post at the same time."""

    def __init__(self, spans: Iterable[Posted] = ()) -> None:
        self._spans = sorted(spans)
        # Ends are not in order where several threads post; the latest end so far is.
        self._ended_ns = list(accumulate((span.end_ns for span in self._spans), max))

    def during(self, start_ns: int, end_ns: int) -> Iterator[Posted]:
        """Yield the posts that were under way in [start_ns, end_ns), in order, each cut to the time since the last."""
        at_ns = start_ns
        for position in range(bisect_right(self._ended_ns, start_ns), len(self._spans)):
            span = self._spans[position]
            if at_ns >= end_ns or span.start_ns >= end_ns:
                return
            begin_ns, stop_ns = max(at_ns, span.start_ns), min(end_ns, span.end_ns)
            if stop_ns > begin_ns:
                yield span._replace(start_ns=begin_ns, end_ns=stop_ns)
                at_ns = stop_ns


def step_end_ns(step: Step) -> int:
    """Return when the step was over: taken in by the scheduler, else the latest that is known of it. Unix ns."""
    return step.ended_ns or max(step.connected_ns, step.forwarded_ns, step.started_ns, step.scheduled_ns)


# What the events of an engine are that a timeline is made from.
_KINDS = {
    **{stage.name: stage.name.partition(".")[0] for stage in stages.STAGES if stage.where is stages.Where.ENGINE},
    **{stage.name: "handshake" for stage in (stages.HANDSHAKE_STARTED, stages.HANDSHAKE_ENDED)},
    **dict.fromkeys(looks.STAGES - occupancy.STAGES, "queue"),
    **dict.fromkeys(occupancy.STAGES, "blocks"),
}


def timelines(events: Iterable[Event], processes: Mapping[int, Process]) -> dict[str, Timeline]:
    """Return per engine id its steps, sender threads, handshakes and blocks, from all events of a run."""
    stamps: dict[str, list[Event]] = defaultdict(list)
    senders: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    handshakes: dict[str, list[Event]] = defaultdict(list)
    holding: dict[str, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    queued: dict[str, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        kind = _KINDS.get(event.stage)
        process = processes.get(event.process) if kind is not None else None
        if process is None:
            continue
        if kind == "step":
            stamps[process.engine].append(event)
        elif kind == "sender":
            senders[process.engine][event.process].append(event)
        elif kind == "handshake":
            handshakes[process.engine].append(event)
        elif kind == "blocks":
            holding[process.engine][event.request].append(event)
        if event.stage in looks.STAGES:
            queued[process.engine][event.request].append(event)
    several = {process.engine for process in processes.values() if process.tp_size > 1}
    engines = set(stamps) | set(senders) | set(handshakes) | set(holding) | set(queued)
    return {
        engine: Timeline(
            _steps(stamps[engine], several=engine in several),
            {process: _awake(seen) for process, seen in senders[engine].items()},
            _handshakes(handshakes[engine]),
            Occupancy(span for seen in holding[engine].values() for span in occupancy.spans(sorted(seen))),
            looks.vain(queued[engine].values()),
            _limits(engine, processes),
        )
        for engine in engines
    }


def _limits(engine: str, processes: Mapping[int, Process]) -> Limits:
    """Return the limits of an engine's scheduler; none where it was started again with others."""
    found = {
        Limits(one.max_tokens, one.max_requests)
        for one in processes.values()
        if one.engine == engine and one.max_tokens and one.max_requests
    }
    return next(iter(found)) if len(found) == 1 else Limits()


def _steps(stamps: Iterable[Event], *, several: bool) -> list[Step]:
    """Return the steps of one engine: one that is made up under a number that was used before is another one."""
    latest: dict[int, dict[str, list[Event]]] = {}
    found: list[tuple[int, dict[str, list[Event]]]] = []
    for event in sorted(stamps):
        step = latest.get(event.a)
        if step is None or (event.stage == stages.STEP_SCHEDULED.name and event.stage in step):
            step = latest[event.a] = {}
            found.append((event.a, step))
        step.setdefault(event.stage, []).append(event)
    return [_step(number, step, several=several) for number, step in found]


def _step(number: int, found: Mapping[str, list[Event]], *, several: bool) -> Step:
    """Return the step of these events, which are not none and stand in time order under each stage's name."""

    def last(stage: stages.Stage) -> int:
        seen = found.get(stage.name)
        return seen[-1].t_ns if seen else 0

    scheduled = found.get(stages.STEP_SCHEDULED.name, ())
    started = found.get(stages.STEP_STARTED.name, ())
    connected = found.get(stages.STEP_CONNECTED.name, ())
    ended = found.get(stages.STEP_ENDED.name, ())
    starved = found.get(stages.WORKER_STARVED.name, ())
    slowest = max(connected, key=_connector_ns) if connected else None
    return Step(
        step=number,
        scheduled_ns=scheduled[0].t_ns if scheduled else min(events[0].t_ns for events in found.values()),
        started_ns=started[0].t_ns if started else 0,
        forwarded_ns=last(stages.STEP_FORWARDED),
        connected_ns=last(stages.STEP_CONNECTED),
        ended_ns=last(stages.STEP_ENDED),
        connector_ns=slowest.c if slowest is not None else 0,
        before_forward_ns=slowest.d if slowest is not None else 0,
        tokens=scheduled[0].b if scheduled else 0,
        requests=scheduled[0].c if scheduled else 0,
        slowest=slowest.process if slowest is not None else 0,
        ranks=tuple(sorted((event.t_ns, event.b) for event in connected)) if several else (),
        starved_ns=max(0, ended[0].b) if ended else 0,
        forward_starved_ns=max((0, *(event.c for event in starved))),
        connector_starved_ns=max((0, *(event.d for event in starved))),
        result_starved_ns=_result_starved_ns(found),
    )


def _result_starved_ns(found: Mapping[str, list[Event]]) -> int:
    """Return for how long at least a worker that was told to sample had no processor until its result was there, ns.

    Until it was told it looked for the order again and again, and what it lacked then was the order.
    """
    starved = found.get(stages.RESULT_STARVED.name)
    if not starved:
        return 0
    connected, ended = found.get(stages.STEP_CONNECTED.name), found.get(stages.STEP_ENDED.name)
    looked_ns = ended[0].t_ns - ended[0].c - connected[0].t_ns if connected and ended and ended[0].c > 0 else 0
    return max(0, max(event.c for event in starved) - max(0, looked_ns))


def _connector_ns(connected: Event) -> int:
    return connected.c


def _awake(seen: list[Event]) -> list[Awake]:
    stretches: list[Awake] = []
    woke: Event | None = None
    for event in sorted(seen):
        if event.stage == stages.SENDER_WOKE.name:
            woke = event
        elif woke is not None:
            stretches.append(Awake(woke.t_ns, event.t_ns))
            woke = None
    if woke is not None:
        stretches.append(Awake(woke.t_ns, NEVER_NS))
    return stretches


def _handshakes(seen: list[Event]) -> list[Handshake]:
    """Return every handshake of one engine; one that never ended ends with time."""
    spans = []
    begun: dict[tuple[int, str], int] = {}
    for event in sorted(seen):
        key = (event.process, event.ref)
        if event.stage == stages.HANDSHAKE_STARTED.name:
            begun.setdefault(key, event.t_ns)
        elif key in begun:
            spans.append(Handshake(begun.pop(key), event.t_ns, event.ref, event.process))
    return spans + [Handshake(start_ns, NEVER_NS, peer, process) for (process, peer), start_ns in begun.items()]
