"""The points that a worker's connector sees: steps on the forward thread, loads, blocks handed over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from instrumented_connectors import privates
from instrumented_connectors.scheduler_side import STEP_ATTRIBUTE
from instrumented_connectors.starvation import WORTH_NS, starved_ns
from instrumented_connectors.step_mark import StepMark
from instrumented_connectors.watch import Tracer, now_ns, watch
from kvtrace import stages

if TYPE_CHECKING:
    from instrumented_connectors.cores import Cores
    from instrumented_connectors.device_clock import DeviceClock
    from instrumented_connectors.holdings import Holdings

_STEP_STARTED = stages.STEP_STARTED.code
_STEP_FORWARDED = stages.STEP_FORWARDED.code
_STEP_CONNECTED = stages.STEP_CONNECTED.code
_WORKER_STARVED = stages.WORKER_STARVED.code
_RESULT_STARVED = stages.RESULT_STARVED.code
_LOAD_STARTED = stages.LOAD_STARTED.code
_REGISTRATION_QUEUED = stages.REGISTRATION_QUEUED.code
_STAGED = stages.PREFILL_STAGED.code
_NO_MARK = StepMark((0, 0, True, False))


class WorkerSide:
    """Watches a worker's connector and emits what it sees.

    A step is followed from the binding of its metadata to the clearing of it. The forward ends
    before the first hook that vLLM calls behind it: which one that is depends on the model runner
    and on whether the step has loads that must come first, so whichever comes first counts.
    """

    def __init__(
        self, tracer: Tracer, holdings: Holdings, rank: int, *, pulls: bool, device_clock: DeviceClock | None,
        cores: Cores | None = None,
    ) -> None:  # fmt: skip
        self._tracer = tracer
        self._holdings = holdings
        self._rank = rank
        self._pulls = pulls
        self._device_clock = device_clock
        self._cores = cores
        self._metadata: Any = None
        self._mark = _NO_MARK
        self._step = 0
        self._has_forward = self._is_prompt = False
        self._loads_late = True
        self._started_ns = 0
        self._forwarded = False
        self._shown = False
        self._spent_ns = 0
        self._before_ns = 0
        self._forwarded_ns = 0
        self._count_ns = self._starved_ns = 0
        self._last_ns = self._last_count_ns = 0
        self._has_result = False

    def attach(self, connector: Any) -> None:
        """Watch the connector's worker hooks."""
        tracer = self._tracer
        watch(connector, "bind_connector_metadata", tracer, before=self._bound)
        watch(connector, "finish_forward", tracer, before=self._behind_forward)
        watch(connector, "start_load_kv", tracer, before=self._before_load, after=self._after_load)
        watch(connector, "wait_for_save", tracer, before=self._behind_forward, after=self._after_hook)
        watch(connector, "get_transfer_results", tracer, before=self._behind_forward, after=self._after_results)
        watch(connector, "clear_connector_metadata", tracer, before=self._cleared)
        watch(connector, "shutdown", tracer, before=self._resolve)
        process = getattr(sys.modules.get(privates.WORKER_MODULE), privates.WORKER_CLASS, None)
        if process is not None:
            watch(process, privates.WORKER_RESULT, tracer, before=self._handing_over)

    def _bound(self, connector_metadata: Any) -> None:
        self._resolve()
        if self._cores is not None:
            self._cores.stepped()  # this is the forward thread
        self._metadata = connector_metadata
        mark = getattr(connector_metadata, STEP_ATTRIBUTE, _NO_MARK)
        self._mark = mark
        self._step, tokens, self._loads_late, self._is_prompt = mark
        self._started_ns = mark.taken_ns or now_ns()
        self._has_forward = tokens > 0
        self._forwarded = self._shown = False
        self._spent_ns = self._before_ns = 0
        self._starved_ns = 0
        if self._is_prompt:
            self._count_ns = mark.taken_starved_ns if mark.taken_ns else starved_ns()
        if self._has_forward:
            self._show()

    def _show(self) -> None:
        """Show the step: always if it has a forward, else once something happens in it."""
        if not self._shown and self._step:
            self._shown = True
            self._tracer.emit(_STEP_STARTED, "", self._step, self._rank, 0, 0, "", self._started_ns)

    def _behind_forward(self, *_args: Any, **_kwargs: Any) -> int:
        now = now_ns()
        if self._has_forward and not self._forwarded:
            self._forwarded = True
            self._forwarded_ns = now
            if self._is_prompt:
                self._count_forward(now)
            if self._device_clock is not None:
                self._device_clock.mark(self._step)
            else:
                self._tracer.emit(_STEP_FORWARDED, "", self._step, self._rank, 0, 0, "", now)
        return now

    def _before_load(self, *_args: Any, **_kwargs: Any) -> int:
        now = self._behind_forward() if self._loads_late else now_ns()
        metadata = self._metadata
        if metadata is None:
            return now
        emit = self._tracer.emit
        self._holdings.take(metadata)
        if self._pulls:
            for request_id, meta in metadata.reqs_to_recv.items():
                if blocks := self._holdings.awaits(request_id):
                    self._show()
                    emit(_LOAD_STARTED, request_id, self._rank, blocks, 0, 0, meta.remote.engine_id)
            return now
        for request_id in metadata.push_registrations:
            self._show()
            emit(_REGISTRATION_QUEUED, request_id, self._rank)
        for request_id in metadata.push_finished_blocks:
            self._show()
            emit(_STAGED, request_id, self._rank)
        return now

    def _after_load(self, began_ns: int, _result: None, *_args: Any, **_kwargs: Any) -> None:
        if self._metadata is not None and self._holdings.lease(self._metadata):
            self._show()
        self._after_hook(began_ns, None)

    def _after_hook(self, began_ns: int, _result: Any, *_args: Any, **_kwargs: Any) -> None:
        spent_ns = now_ns() - began_ns
        self._spent_ns += spent_ns
        if self._has_forward and not self._forwarded:
            self._before_ns += spent_ns
            if self._is_prompt:
                self._count_ns = starved_ns()  # what the connector's work had to wait for is not the forward's

    def _after_results(self, began_ns: int, results: Any, *_args: Any, **_kwargs: Any) -> None:
        if self._holdings.settle(results):
            self._show()
        self._after_hook(began_ns, None)

    def _cleared(self) -> None:
        self._metadata = None
        if self._shown:
            self._shown = False
            self._tracer.emit(_STEP_CONNECTED, "", self._step, self._rank, self._spent_ns, self._before_ns)
            if self._forwarded and self._is_prompt:
                self._count_connector()
            elif self._forwarded and self._device_clock is None:
                self._count_step()

    def _handing_over(self, _process: Any, output: Any, *_args: Any) -> None:
        """Say how long this thread had no processor since the connector's work, now that the result is made."""
        if not self._has_result or output is None:  # a release may sample in a call of its own
            return
        self._has_result = False
        now = now_ns()
        result_ns = self._mark.starved_since_ns(now)
        if result_ns >= WORTH_NS:
            self._tracer.emit(_RESULT_STARVED, "", self._step, self._rank, result_ns, 0, "", now)

    def _count_forward(self, now: int) -> None:
        """Note how long this thread had no processor in the forward; of a device's forward that says nothing."""
        before_ns, self._count_ns = self._count_ns, starved_ns()
        if self._device_clock is None:
            began_ns = self._started_ns + self._before_ns
            self._starved_ns = min(max(0, self._count_ns - before_ns), max(0, now - began_ns))

    def _count_connector(self) -> None:
        """Say how long this thread had no processor in the forward, and at least in the connector's work behind it."""
        now = now_ns()
        took_ns, behind_ns = now - self._forwarded_ns, self._spent_ns - self._before_ns
        if took_ns < WORTH_NS:  # too short to be told of: the result is not charged with what it may have lacked
            count_ns, connector_ns = self._count_ns + took_ns, 0
        else:
            count_ns = starved_ns()
            connector_ns = min(max(0, count_ns - self._count_ns - (took_ns - behind_ns)), behind_ns)
        self._mark.connected(self._rank, now, count_ns)
        self._last_ns, self._last_count_ns = now, count_ns
        self._has_result = True
        if self._starved_ns + connector_ns >= WORTH_NS:
            self._tracer.emit(_WORKER_STARVED, "", self._step, self._rank, self._starved_ns, connector_ns, "", now)

    def _count_step(self) -> None:
        """Say how long this thread had no processor at least in a forward that works on no prompt, by one reading.

        Of what was counted since the last reading, all that lay outside of the forward may have had its own length.
        """
        now, count_ns = now_ns(), starved_ns()
        last_ns, last_count_ns, self._last_ns, self._last_count_ns = self._last_ns, self._last_count_ns, now, count_ns
        forward_ns = max(0, self._forwarded_ns - self._started_ns - self._before_ns)
        lacked_ns = min(count_ns - last_count_ns - (now - last_ns - forward_ns), forward_ns)
        if lacked_ns >= WORTH_NS and last_ns:
            self._tracer.emit(_WORKER_STARVED, "", self._step, self._rank, lacked_ns, 0, "", now)

    def _resolve(self) -> None:
        """Emit the forwards whose device events have passed by now."""
        if self._device_clock is None:
            return
        for step, passed_ns in self._device_clock.passed():
            self._tracer.emit(_STEP_FORWARDED, "", step, self._rank, 1, 0, "", passed_ns)
