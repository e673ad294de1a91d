"""The points that the NIXL agent sees: descriptors, posts, polls, notifications, on whichever thread."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from instrumented_connectors.descriptors import Lengths, handle_key
from instrumented_connectors.registrations import read_registration
from instrumented_connectors.starvation import WORTH_NS, Look
from instrumented_connectors.watch import Bounded, Forwarder, Tracer, now_ns, watch
from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumented_connectors.holdings import Holdings
    from instrumented_connectors.probe import Probe

_PREPARED = stages.PREPARED.code
_POST_STARTED = stages.POST_STARTED.code
_POST_ENDED = stages.POST_ENDED.code
_POST_STARVED = stages.POST_STARVED.code
_NOTICE_STARVED = stages.NOTICE_STARVED.code
_DONE = stages.TRANSFER_DONE.code
_FAILED = stages.TRANSFER_FAILED.code
_REGISTRATION_SENT = stages.REGISTRATION_SENT.code
_REGISTRATION_RECEIVED = stages.REGISTRATION_RECEIVED.code

_REGISTRATION = b"PUSH_REG:"
_HEARTBEAT = b"HB:"
_AT_ONCE_NS = 100_000
"""Looks that follow one another within this time are one round of the thread: one reading of the kernel's is enough."""

_numbers = itertools.count(1)


class Transfer:
    """One transfer between the making of its descriptors and the release of its handle."""

    __slots__ = (
        "descriptors", "indices", "last_pending_ns", "lengths", "look", "number", "over", "polls", "request", "writes",
    )  # fmt: skip

    def __init__(self, request: str, lengths: Lengths | None, indices: Any, *, writes: bool) -> None:
        self.number = next(_numbers)
        self.request = request
        self.lengths = lengths
        self.indices = indices
        self.descriptors = len(indices)
        self.writes = writes
        self.last_pending_ns = 0
        self.polls = 0
        self.over = False
        self.look: Look | None = None

    def moved_bytes(self) -> int:
        """Return the bytes that the transfer moves, 0 where its descriptors were not seen."""
        lengths, indices, self.lengths, self.indices = self.lengths, self.indices, None, None
        return 0 if lengths is None else lengths.total(indices)


class AgentSide:
    """Watches a NIXL agent and emits what it sees."""

    def __init__(self, tracer: Tracer, holdings: Holdings, rank: int, probe: Probe | None) -> None:
        self._tracer = tracer
        self._holdings = holdings
        self._rank = rank
        self._probe = probe
        self._transfers: dict[int, Transfer] = {}
        self._lengths: dict[int, Lengths] = {}
        self._made: tuple[int, Lengths] | None = None
        self._current = ("", "")
        self._sent: tuple[str, int] = ("", 0)
        self._look: Look | None = None
        self.worked: Callable[[], None] = lambda: None

    def attach(self, agent: Any) -> Any:
        """Return a stand-in for the agent whose calls are watched."""
        proxy = Forwarder(agent)
        tracer = self._tracer
        if self._probe is not None:
            self._probe.guard(proxy)
        watch(proxy, "get_xfer_descs", tracer, after=self._descriptors_made)
        watch(proxy, "prep_xfer_dlist", tracer, after=self._list_prepared)
        watch(proxy, "release_dlist_handle", tracer, before=self._list_released)
        watch(proxy, "make_prepped_xfer", tracer, after=self._prepared, failed=self._not_prepared)
        watch(proxy, "transfer", tracer, before=self._posting, after=self._posted, failed=self._not_posted)
        watch(proxy, "check_xfer_state", tracer, before=self._polling, after=self._polled, failed=self._not_polled)
        watch(proxy, "release_xfer_handle", tracer, before=self._released)
        watch(proxy, "send_notif", tracer, after=self._notification_sent)
        watch(proxy, "get_new_notifs", tracer, after=self._notifications)
        return proxy

    def enter(self, request: str, remote_request: str) -> None:
        """Say for which request the transfers that come next on this thread are."""
        self._current = (request, remote_request)

    @property
    def current(self) -> tuple[str, str]:
        """Return for which request, and under which id on the other side, transfers are made at present."""
        return self._current

    # Descriptors ---------------------------------------------------------------------------------

    def _descriptors_made(self, _token: None, result: Any, descs: Any, *_args: Any, **_kwargs: Any) -> None:
        lengths = Lengths.of(descs)
        self._made = None if lengths is None else (id(result), lengths)

    def _list_prepared(
        self, _token: None, handle: Any, agent_name: str, xfer_list: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        if agent_name not in ("NIXL_INIT_AGENT", ""):
            return  # the local side's lengths say what a transfer moves
        made, self._made = self._made, None
        lengths = made[1] if made is not None and made[0] == id(xfer_list) else Lengths.of(xfer_list)
        if lengths is not None:
            self._lengths[handle_key(handle)] = lengths

    def _list_released(self, handle: Any) -> None:
        self._lengths.pop(handle_key(handle), None)

    # Transfers -----------------------------------------------------------------------------------

    def _prepared(
        self,
        _token: None,
        handle: Any,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        *_args: Any,
        notif_msg: bytes = b"",
        **_kwargs: Any,
    ) -> None:
        request, remote = self._current
        if notif_msg:
            remote = _request_of(notif_msg)[0]
        lengths = self._lengths.get(handle_key(local_xfer_side))
        transfer = Transfer(request, lengths, local_indices, writes=operation == "WRITE")
        if len(self._transfers) >= Bounded.LIMIT:
            self._transfers.clear()
        self._transfers[handle_key(handle)] = transfer
        self._tracer.emit(_PREPARED, request, transfer.number, transfer.descriptors, self._rank, 0, remote)
        self.worked()

    def _not_prepared(self, _token: None, error: BaseException, *_args: Any, **_kwargs: Any) -> None:
        self._tracer.emit(_FAILED, self._current[0], next(_numbers), 0, 0, 0, _reason(error))

    def _posting(self, handle: Any, *_args: Any, **_kwargs: Any) -> Transfer | None:
        transfer = self._transfers.get(handle_key(handle))
        if transfer is not None:
            transfer.look = Look.at(now_ns())
            self._tracer.emit(_POST_STARTED, transfer.request, transfer.number, 0, 0, 0, "", transfer.look.t_ns)
        return transfer

    def _posted(self, transfer: Transfer | None, status: str, handle: Any, *_args: Any, **_kwargs: Any) -> None:
        now = now_ns()
        if transfer is None:
            return
        done = int(status == "DONE")
        moved_bytes = transfer.moved_bytes()
        self._tracer.emit(
            _POST_ENDED, transfer.request, transfer.number, moved_bytes, transfer.descriptors, done, "", now
        )
        began = transfer.look
        if began is not None and now - began.t_ns >= WORTH_NS:
            transfer.look = Look.at(now)
            starved_ns = transfer.look.starved_since_ns(began)
            if starved_ns >= WORTH_NS:
                self._tracer.emit(_POST_STARVED, transfer.request, transfer.number, starved_ns, 0, 0, "", now)
        if status == "ERR":
            self._fail(transfer, status)
        elif self._probe is not None and not done:
            self._probe.follow(handle, transfer)

    def _not_posted(self, transfer: Transfer | None, error: BaseException, *_args: Any, **_kwargs: Any) -> None:
        self._fail(transfer, _reason(error))

    def _polling(self, _handle: Any) -> int:
        return now_ns()

    def _polled(self, began_ns: int, status: str, handle: Any) -> None:
        transfer = self._transfers.get(handle_key(handle))
        if transfer is None or transfer.over:
            return
        transfer.polls += 1
        if status == "PROC":
            transfer.last_pending_ns = began_ns
            if not transfer.writes:
                transfer.look = self._looked(began_ns)
        elif status == "DONE":
            now = now_ns()
            transfer.over = True
            self._tracer.emit(
                _DONE, transfer.request, transfer.number, transfer.last_pending_ns, transfer.polls, 0, "", now
            )
            if transfer.writes:
                self._holdings.written(transfer.request)
            elif transfer.look is not None:
                self._noticed(transfer.request, now, transfer.look, Look.at(now))
        else:
            self._fail(transfer, status)

    def _not_polled(self, _token: int, error: BaseException, handle: Any) -> None:
        self._fail(self._transfers.get(handle_key(handle)), _reason(error))

    def _fail(self, transfer: Transfer | None, reason: str) -> None:
        if transfer is not None and not transfer.over:
            transfer.over = True
            self._tracer.emit(_FAILED, transfer.request, transfer.number, 0, 0, 0, reason)

    def _released(self, handle: Any) -> None:
        self._transfers.pop(handle_key(handle), None)

    # Notifications -------------------------------------------------------------------------------

    def _notification_sent(
        self, _token: None, _result: Any, remote_agent_name: str, notif_msg: bytes, *_args: Any, **_kwargs: Any
    ) -> None:
        del remote_agent_name  # named as NIXL names it, so that keywords find their place
        if not notif_msg.startswith(_REGISTRATION):
            return
        registration = read_registration(notif_msg[len(_REGISTRATION) :])
        if registration is None:
            return
        request = registration[0]
        order = self._sent[1] + 1 if self._sent[0] == request else 0
        self._sent = (request, order)
        # Stamped behind the call: until it returns, the message may still be on D.
        self._tracer.emit(_REGISTRATION_SENT, request, self._rank, len(notif_msg), order)
        self.worked()

    def _notifications(self, _token: None, result: dict[str, list[bytes]], *_args: Any, **_kwargs: Any) -> None:
        before = self._look
        if self._holdings.is_awaiting:
            self._looked(now_ns())
        if not result:
            return
        for messages in result.values():
            for message in messages:
                self._notification(message, before)
        self.worked()

    def _notification(self, message: bytes, before: Look | None) -> None:
        if message.startswith(_REGISTRATION):
            registration = read_registration(message[len(_REGISTRATION) :])
            if registration is not None:
                request, engine = registration
                self._tracer.emit(_REGISTRATION_RECEIVED, request, self._rank, 0, 0, 0, engine)
        elif message.startswith(_HEARTBEAT):
            self._holdings.extend(message[len(_HEARTBEAT) :].decode("utf-8", "replace"))
        else:
            request, readers = _request_of(message)
            noticed_ns = self._holdings.notified(request, readers)
            if noticed_ns and before is not None and self._look is not None:
                self._noticed(request, noticed_ns, before, self._look)

    def _looked(self, now: int) -> Look:
        """Return the moment of a look: of several that follow one another at once, the first."""
        look = self._look
        if look is None or now - look.t_ns > _AT_ONCE_NS or look.thread != threading.get_ident():
            look = self._look = Look.at(now)
        return look

    def _noticed(self, request: str, now: int, before: Look, look: Look) -> None:
        """Say how long the thread that has noticed the KV had no processor since its look before."""
        starved_ns = look.starved_since_ns(before)
        if starved_ns >= WORTH_NS:
            self._tracer.emit(_NOTICE_STARVED, request, self._rank, starved_ns, now - before.t_ns, 0, "", now)


def _request_of(message: bytes | str) -> tuple[str, str]:
    """Return the request id and the count that a completion notification names."""
    text = message if isinstance(message, str) else message.decode("utf-8", "replace")
    request, _, count = text.rpartition(":")
    return (request, count) if request else (count, "")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
