"""What a worker holds for others (blocks on P, until a lease ends) and what it waits for (KV on D)."""

from __future__ import annotations

from typing import Any

from instrumented_connectors.watch import Bounded, Tracer, now_ns
from kvtrace import stages

_LEASE_STARTED = stages.LEASE_STARTED.code
_LEASE_EXTENDED = stages.LEASE_EXTENDED.code
_LEASE_EXPIRED = stages.LEASE_EXPIRED.code
_REPORTED = stages.REPORTED.code
_LOAD_FAILED = stages.LOAD_FAILED.code
_NOTIFIED = stages.NOTIFIED.code
_ORPHANED = stages.ORPHANED.code


class _Held:
    """A request of which this worker holds blocks; the deadline is 0 until its lease starts."""

    __slots__ = ("deadline_ns", "read", "readers")

    def __init__(self) -> None:
        self.deadline_ns = 0
        self.readers = 0
        self.read = False


class Holdings:
    """The requests that one worker knows, from the metadata of its steps.

    `connector` is which of its process's watched connectors this one is: a MultiConnector has several.
    The sender thread calls `extend`, `notified` and `written`: they change fields of one request, never the two tables.
    """

    def __init__(self, tracer: Tracer, rank: int, extension_ns: int, connector: int = 0) -> None:
        self._tracer = tracer
        self._rank = rank
        self._connector = connector
        self._extension_ns = extension_ns
        self._held: Bounded = Bounded()
        self._awaited: Bounded = Bounded()

    def take(self, metadata: Any) -> None:
        """Take in a step's metadata before vLLM does: what is held and what is awaited from now on."""
        for request_id in metadata.reqs_in_batch:
            if request_id not in self._held:
                self._held[request_id] = _Held()
        for request_id in metadata.reqs_not_processed:
            self._held.pop(request_id, None)
        for request_id, meta in metadata.reqs_to_recv.items():
            blocks = sum(len(group) for group in meta.local_block_ids)
            if blocks:
                self._awaited[request_id] = blocks

    def lease(self, metadata: Any) -> bool:
        """Start the leases of a step's metadata; return whether there were any."""
        now = now_ns()
        for request_id, expiry_s in metadata.reqs_to_send.items():
            held = self._held.get(request_id)
            if held is None or held.read:
                continue
            left_ns = int((expiry_s - metadata.scheduler_clock) * 1e9)
            held.deadline_ns = now + left_ns
            self._tracer.emit(_LEASE_STARTED, request_id, self._rank, left_ns, 0, 0, "", now)
        return bool(metadata.reqs_to_send)

    def extend(self, heartbeat: str) -> None:
        """Extend the leases that a heartbeat (ids, joined by commas) names."""
        for request_id in heartbeat.split(","):
            held = self._held.get(request_id)
            if held is not None and held.deadline_ns:
                held.deadline_ns = max(held.deadline_ns, now_ns() + self._extension_ns)
                self._tracer.emit(_LEASE_EXTENDED, request_id, self._rank)

    @property
    def is_awaiting(self) -> bool:
        """Return whether KV is to come here."""
        return bool(self._awaited)

    def notified(self, request_id: str, readers: str) -> int:
        """Take in a completion notification: the request's KV has been read, or has arrived.

        Return when, if it was awaited here (CLOCK_MONOTONIC, ns), else 0.
        """
        now = now_ns()
        held = self._held.get(request_id)
        if held is not None:
            held.readers += 1
            held.read = held.readers >= (int(readers) if readers.isdecimal() else 1)
        elif request_id not in self._awaited:
            self._tracer.emit(_ORPHANED, request_id, self._rank, 0, 0, 0, "", now)
            return 0
        self._tracer.emit(_NOTIFIED, request_id, self._rank, 0, 0, 0, "", now)
        return now if held is None else 0

    def written(self, request_id: str) -> None:
        """Note that a WRITE of the request's blocks is done."""
        held = self._held.get(request_id)
        if held is not None:
            held.read = True

    def awaits(self, request_id: str) -> int:
        """Return the number of blocks that the request still waits for."""
        return int(self._awaited.get(request_id, 0))

    def settle(self, results: Any) -> bool:
        """Take in what a worker reports at the end of a step; return whether it reports anything."""
        now = now_ns()
        emit = self._tracer.emit
        for request_id in results.finished_recving:
            blocks = self._awaited.pop(request_id, 0)
            if request_id in results.failed_recving:
                emit(_LOAD_FAILED, request_id, self._rank, blocks, 0, 0, "", now)
            else:
                emit(_REPORTED, request_id, self._rank, self._connector, 0, 0, "", now)
        for request_id in results.finished_sending:
            held = self._held.pop(request_id, None)
            if held is not None and not held.read and 0 < held.deadline_ns <= now:
                emit(_LEASE_EXPIRED, request_id, self._rank, 0, 0, 0, "", now)
        return bool(results.finished_recving or results.finished_sending)
