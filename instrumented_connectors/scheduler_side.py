"""The points that the scheduler's connector sees: requests and steps as the engine core knows them."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from instrumented_connectors import intake, privates
from instrumented_connectors.starvation import WORTH_NS, starved_ns
from instrumented_connectors.step_mark import StepMark
from instrumented_connectors.watch import Bounded, Tracer, now_ns, watch
from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Iterable

STEP_ATTRIBUTE = "kvtrace_step"
"""Name of the attribute of the connector's metadata that carries (step, tokens, loads come late) to the workers."""

_PREFILL, _DECODE = 0, 1
_ENQUEUED = (stages.PREFILL_ENQUEUED.code, stages.DECODE_ENQUEUED.code)
_CONSIDERED = (stages.PREFILL_CONSIDERED.code, stages.DECODE_CONSIDERED.code)
_ALLOCATED = (stages.PREFILL_ALLOCATED.code, stages.DECODE_ALLOCATED.code)
_SCHEDULED = (stages.PREFILL_SCHEDULED.code, stages.DECODE_SCHEDULED.code)
_PREEMPTED = (stages.PREFILL_PREEMPTED.code, stages.DECODE_PREEMPTED.code)
_FINISHED = (stages.PREFILL_FINISHED.code, stages.DECODE_FINISHED.code)
_ABORTED = (stages.PREFILL_ABORTED.code, stages.DECODE_ABORTED.code)
_READY = stages.READY.code
_RELEASED = stages.PREFILL_RELEASED.code
_STEP_SCHEDULED = stages.STEP_SCHEDULED.code
_STEP_ENDED = stages.STEP_ENDED.code
_RESULT_STARVED = stages.RESULT_STARVED.code

_CONSIDERED_EVERY_NS = 10_000_000
_STEPS_IN_FLIGHT = 256
_PAUSE_NS = 1_000_000
"""A shorter one between two steps is the scheduler's own turn, whatever it waited for."""


class _Live:
    """One request between its arrival in the scheduler and its end."""

    __slots__ = ("allocated", "considered_ns", "leg", "looked_ns", "request")

    def __init__(self, request: Any, leg: int) -> None:
        self.request = request
        self.leg = leg
        self.allocated = False
        self.considered_ns = 0
        self.looked_ns = 0


class _Step:
    """One step between its making and the taking in of its result."""

    __slots__ = (
        "made_ns", "mark", "number", "ordered_ns", "paused", "requests", "shown", "starved_ns", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, made_ns: int, tokens: int, requests: int, waiting: int, mark: StepMark) -> None:
        self.number = number
        self.mark = mark
        self.made_ns = made_ns
        self.tokens = tokens
        self.requests = requests
        self.waiting = waiting
        self.paused = False
        self.starved_ns = 0
        self.shown = False
        self.ordered_ns = 0


class SchedulerSide:
    """Watches a scheduler's connector and emits what it sees.

    Steps without tokens are shown only where something happens in them, since an engine that waits
    for KV makes about one such step each millisecond.
    """

    def __init__(self, tracer: Tracer, *, producer: bool) -> None:
        self._tracer = tracer
        self._default_leg = _PREFILL if producer else _DECODE
        self._live: Bounded = Bounded()
        self._prompting: Bounded = Bounded()
        self._awaiting: dict[str, None] = {}
        self._steps: deque[_Step] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._number = 0
        self._took_in = False
        self._ended_ns = 0
        self._starved_ns: int | None = None  # what the kernel had counted at that end; None where it was not asked
        self._came_ns = 0

    def attach(self, connector: Any) -> None:
        """Watch the connector's scheduler hooks."""
        tracer = self._tracer
        intake.attach(tracer)
        watch(connector, "on_new_request", tracer, before=self._enqueued)
        watch(connector, "get_num_new_matched_tokens", tracer, after=self._considered)
        watch(connector, "update_state_after_alloc", tracer, after=self._allocated)
        watch(connector, "build_connector_meta", tracer, after=self._scheduled)
        watch(connector, "request_finished", tracer, after=self._finished)
        watch(connector, "request_finished_all_groups", tracer, after=self._finished)
        watch(connector, "update_connector_output", tracer, before=self._output)
        # The scheduler asks for stats once for every step's result, as the last thing that it asks.
        watch(connector, "get_kv_connector_stats", tracer, before=self._ended)
        executor = getattr(sys.modules.get(privates.WORKER_MODULE), privates.EXECUTOR_CLASS, None)
        if executor is not None:
            watch(executor, privates.EXECUTOR_SAMPLES, tracer, before=self._ordered)

    def _leg(self, params: dict[str, Any] | None) -> int:
        if params and params.get("do_remote_decode"):
            return _PREFILL
        if params and params.get("do_remote_prefill"):
            return _DECODE
        return self._default_leg

    def _enqueued(self, request: Any) -> None:
        params = request.kv_transfer_params
        leg = self._leg(params)
        remote = 1 if params and params.get("do_remote_prefill") else 0
        ref = str(params.get("remote_request_id") or "") if params and leg == _DECODE else ""
        request_id = request.request_id
        self._live[request_id] = self._prompting[request_id] = _Live(request, leg)
        arrival_ns = int(request.arrival_time * 1e9)
        came = intake.coming(request)
        waited_ns = came.waited_ns()
        self._came_ns = max(self._came_ns, came.t_ns)
        if self._starved_ns is None and came.t_ns >= self._ended_ns > 0:
            self._starved_ns = came.starved_ns or None  # what has been counted since is the least behind that end
        self._tracer.emit(_ENQUEUED[leg], request_id, request.num_prompt_tokens, arrival_ns, remote, waited_ns, ref)

    def _considered(
        self, _token: None, result: tuple[int | None, bool], request: Any, num_computed_tokens: int, *_: Any
    ) -> None:
        live = self._live.get(request.request_id)
        if live is None:
            return
        live.looked_ns = now = now_ns()
        if now - live.considered_ns < _CONSIDERED_EVERY_NS:
            return
        live.considered_ns = now
        self._tracer.emit(_CONSIDERED[live.leg], request.request_id, num_computed_tokens, result[0] or 0, 0, 0, "", now)

    def _allocated(self, _token: None, _result: None, request: Any, blocks: Any, num_external_tokens: int) -> None:
        live = self._live.get(request.request_id)
        # The scheduler allocates again when a request resumes after its load: the blocks are the same ones.
        if live is None or (live.allocated and num_external_tokens <= 0):
            return
        live.allocated = True
        if num_external_tokens > 0:
            self._awaiting[request.request_id] = None
        count = sum(len(group) for group in blocks.blocks)
        params = request.kv_transfer_params
        transfer_id = str(params.get("transfer_id") or "") if params else ""
        now = now_ns()
        looked_ns = now - live.looked_ns if live.looked_ns else 0
        code = _ALLOCATED[live.leg]
        self._tracer.emit(code, request.request_id, count, num_external_tokens, looked_ns, 0, transfer_id, now)

    def _scheduled(self, _token: None, metadata: Any, scheduler_output: Any) -> None:
        now = now_ns()
        self._number += 1
        tokens = scheduler_output.total_num_scheduled_tokens
        late = not getattr(scheduler_output, "has_sync_kv_loads", True)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduler_output.preempted_req_ids or ():
            self._preempted(request_id, now)
        prompts = self._prompting.keys() & scheduled.keys()
        mark = StepMark((self._number, tokens, late, bool(prompts)))
        setattr(metadata, STEP_ATTRIBUTE, mark)
        step = _Step(self._number, now, tokens, len(scheduled), len(self._awaiting), mark)
        is_told = not self._steps and self._starved_ns is not None
        step.paused = is_told and bool(self._ended_ns) and now - self._ended_ns >= _PAUSE_NS
        if len(self._steps) == _STEPS_IN_FLIGHT:
            self._steps.clear()
        self._steps.append(step)
        if prompts:
            self._prompts_scheduled(step.number, prompts, scheduled, now)
        if tokens or _carries_work(metadata):
            self._show(step)
            if step.paused:
                step.starved_ns = self._starved(now, starved_ns())

    def _prompts_scheduled(self, number: int, prompts: set[str], scheduled: dict[str, int], now: int) -> None:
        """Emit the requests of a step that still work on their prompt; the first output token comes with its last."""
        emit = self._tracer.emit
        for request_id in prompts:
            live = self._prompting[request_id]
            request = live.request
            tokens, computed, prompt = scheduled[request_id], request.num_computed_tokens, request.num_prompt_tokens
            emit(_SCHEDULED[live.leg], request_id, number, tokens, computed, prompt, "", now)
            if computed + tokens >= prompt:
                del self._prompting[request_id]

    def _preempted(self, request_id: str, now: int) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        live.allocated = False
        live.considered_ns = live.looked_ns = 0
        self._prompting[request_id] = live
        self._tracer.emit(_PREEMPTED[live.leg], request_id, 0, 0, 0, 0, "", now)

    def _finished(
        self, _token: None, result: tuple[bool, Any], request: Any, block_ids: Iterable[Any], *_: Any
    ) -> None:
        request_id = request.request_id
        live = self._live.pop(request_id, None)
        self._prompting.pop(request_id, None)
        self._awaiting.pop(request_id, None)
        leg = self._leg(request.kv_transfer_params) if live is None else live.leg
        status = request.status.name
        if status == "FINISHED_ABORTED":
            self._tracer.emit(_ABORTED[leg], request_id, 0, 0, 0, 0, status)
        elif leg == _PREFILL:
            self._tracer.emit(_FINISHED[leg], request_id, _count(block_ids), int(result[0]), 0, 0, status)
        else:
            self._tracer.emit(_FINISHED[leg], request_id, request.num_output_tokens, 0, 0, 0, status)

    def _output(self, connector_output: Any) -> None:
        failed = getattr(connector_output, "failed_recving", None) or ()
        for request_id in connector_output.finished_recving or ():
            self._took_in = True
            self._awaiting.pop(request_id, None)
            if request_id not in failed:
                self._tracer.emit(_READY, request_id)
        for request_id in connector_output.finished_sending or ():
            self._took_in = True
            self._tracer.emit(_RELEASED, request_id)

    def _ordered(self, *_args: Any, **_kwargs: Any) -> None:
        """Note when the workers are told to sample; the order is for the step that was made up last."""
        if self._steps:
            self._steps[-1].ordered_ns = now_ns()

    def _ended(self) -> None:
        took_in, self._took_in = self._took_in, False
        if not self._steps:
            return
        step = self._steps.popleft()
        was_hidden = took_in and not step.shown
        if was_hidden:
            self._show(step)
        if not step.shown:
            self._ended_ns, self._starved_ns = 0, None  # it is not worth a reading, at its end or behind it
            return
        now = now_ns()
        ordered_ns = now - step.ordered_ns if step.ordered_ns else 0
        is_owed = was_hidden and step.paused
        is_waited_for = self._prompting or self._awaiting or not self._live or intake.newest_ns() > self._came_ns
        if not (is_owed or step.mark.is_prompt or is_waited_for):
            # No first token waits for this step or the next one, and a reading takes 5 to 10 us behind a forward.
            self._tracer.emit(_STEP_ENDED, "", step.number, step.starved_ns, ordered_ns, 0, "", now)
            self._ended_ns, self._starved_ns = now, None
            return
        count_ns = starved_ns()
        if is_owed:  # of what was counted since, the step itself may have had its own length
            step.starved_ns = self._starved(step.made_ns, count_ns - (now - step.made_ns))
        result_ns = step.mark.starved_since_ns(now, count_ns)
        if result_ns >= WORTH_NS:
            self._tracer.emit(_RESULT_STARVED, "", step.number, step.mark.rank, result_ns, 0, "", now)
        self._tracer.emit(_STEP_ENDED, "", step.number, step.starved_ns, ordered_ns, 0, "", now)
        self._ended_ns, self._starved_ns = now, count_ns

    def _starved(self, now: int, count_ns: int) -> int:
        """Return for how long, ns, this thread had no processor since the last step ended, by the kernel's count.

        At least: where it was not asked then, it was when the first request came since.
        """
        return min(max(0, count_ns - (self._starved_ns or 0)), now - self._ended_ns)

    def _show(self, step: _Step) -> None:
        step.shown = True
        self._tracer.emit(_STEP_SCHEDULED, "", step.number, step.tokens, step.requests, step.waiting, "", step.made_ns)


def _carries_work(metadata: Any) -> bool:
    """Return whether a step without tokens has something for the workers' connectors to do."""
    return bool(
        metadata.reqs_to_recv or metadata.reqs_to_send or metadata.push_registrations or metadata.push_finished_blocks
    )


def _count(block_ids: Iterable[Any]) -> int:
    """Return the number of blocks in a list of blocks, or in a list of such lists."""
    return sum(1 if isinstance(block, int) else len(block) for block in block_ids)
