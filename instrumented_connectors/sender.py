"""The points of push mode's sender thread: its sleep, its queue, what it picks up and matches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instrumented_connectors import privates
from instrumented_connectors.watch import Bounded, Tracer, now_ns, watch
from kvtrace import stages

if TYPE_CHECKING:
    from instrumented_connectors.agent import AgentSide

_WOKE = stages.SENDER_WOKE.code
_SLEPT = stages.SENDER_SLEPT.code
_PICKED = stages.SENDER_PICKED.code
_MATCHED = stages.MATCHED.code


class SenderSide:
    """Watches push mode's sender thread and emits what it sees.

    The thread is woken by every step. A wake is shown if work waited for the thread, or as soon as the
    thread finds some; the idle ones are not, so that the spool is not filled with them.
    """

    def __init__(self, tracer: Tracer, agent: AgentSide, rank: int) -> None:
        self._tracer = tracer
        self._agent = agent
        self._rank = rank
        self._inboxes: list[Any] = []
        self._unmatched: Any = ()
        self._matched: Bounded = Bounded()
        self._signalled_ns = 0
        self._woke: tuple[int, int, int] | None = None
        self._woke_ns = 0

    def attach(self, worker: Any) -> None:
        """Watch the worker's sender thread, which must not have started yet."""
        tracer = self._tracer
        self._agent.worked = self._worked
        inboxes = (privates.REGISTRATION_INBOX, privates.FINISHED_INBOX, privates.DEFERRED_INBOX)
        self._inboxes = [inbox for inbox in (privates.find(worker, each) for each in inboxes) if inbox is not None]
        unmatched = privates.find(worker, privates.UNMATCHED_BLOCKS)
        self._unmatched = () if unmatched is None else unmatched
        finished = privates.find(worker, privates.FINISHED_INBOX)
        if finished is not None:
            watch(finished, "get_nowait", tracer, after=self._picked)
        wake = privates.find(worker, privates.WRITER_WAKE)
        if wake is not None:
            watch(wake, "set", tracer, before=lambda: self._signal(pending=wake.is_set()))
            watch(wake, "wait", tracer, before=self._sleeping, after=self._awake)
        stop = privates.find(worker, privates.WRITER_STOP)
        if stop is not None:
            watch(stop, "wait", tracer, before=self._sleeping, after=self._awake)
        if privates.find(worker, privates.START_PUSH) is not None:
            watch(worker, privates.START_PUSH.name, tracer, before=self._starting, after=self._started)

    def _signal(self, *, pending: bool) -> None:
        if not pending:
            self._signalled_ns = now_ns()

    def _sleeping(self, *_args: Any, **_kwargs: Any) -> int:
        now = now_ns()
        if self._woke is None and self._woke_ns:
            self._tracer.emit(_SLEPT, "", now - self._woke_ns, len(self._unmatched), 0, 0, "", now)
        self._woke = None
        return now

    def _awake(self, slept_from_ns: int, _result: Any, *_args: Any, **_kwargs: Any) -> None:
        now = now_ns()
        signalled_ns, self._signalled_ns = self._signalled_ns, 0
        self._woke_ns = now
        self._woke = (now, now - slept_from_ns, now - signalled_ns if signalled_ns else 0)
        if any(inbox.qsize() for inbox in self._inboxes):
            self._worked()

    def _worked(self) -> None:
        """Show the present wake, now that the thread has something to do."""
        woke, self._woke = self._woke, None
        if woke is not None:
            now, slept_ns, delay_ns = woke
            waiting = sum(inbox.qsize() for inbox in self._inboxes)
            self._tracer.emit(_WOKE, "", slept_ns, waiting, delay_ns, 0, "", now)

    def _picked(self, _token: None, item: tuple[str, Any], *_args: Any, **_kwargs: Any) -> None:
        self._worked()
        self._tracer.emit(_PICKED, item[0], self._rank)

    def _starting(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        decode_request = str(registration_data.get("request_id", ""))
        self._agent.enter(request_id, decode_request)
        # A push that waits for a handshake is started a second time: it is the same match.
        if local_block_ids and self._matched.get(request_id) != decode_request:
            self._matched[request_id] = decode_request
            self._worked()
            self._tracer.emit(_MATCHED, request_id, self._rank, 0, 0, 0, decode_request)

    def _started(self, _token: None, _result: None, *_args: Any, **_kwargs: Any) -> None:
        self._agent.enter("", "")
