"""Spans to an OTLP receiver, over gRPC or HTTP, by OpenTelemetry's own SDK and exporters.

The provider is this module's own: neither the process's global provider nor vLLM's is looked at. Whoever offers spans
never waits, unless asked to: what the receiver does not take is dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrace.errors import ExportError
from kvtrace.exporters.receiver import exporter
from kvtrace.exporters.sdk import Translation
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtrace.exporters.spans import Span

QUEUE_REQUESTS = 2000
TIMEOUT_S = 10.0
FINISH_S = 5.0
# A receiver takes 4 MiB over gRPC unless told otherwise; ids may be long.
_BATCH_BYTES = 1 << 20
_BATCH_REQUESTS = 64
_FAILURES_MAX = 3
_LET_GO_S = 5.0
_ENTRY_BYTES = 64
_VALUE_BYTES = 14  # a time, or what stands around a text
_REASON_LETTERS_MAX = 500
_LOGGER = "opentelemetry.exporter"
_GIVEN_UP = "due to timeout, max retries or shutdown"  # the last word of the one over HTTP, which tells no cause
_REFUSED = os.strerror(errno.ECONNREFUSED)  # as both exporters quote it


@dataclass(slots=True)
class Health:
    """How sending goes, in spans: one thread writes each count. `failure` is what the exporter said last."""

    exported: int = 0
    crowded_out: int = 0
    failed: int = 0
    failure: str = ""

    @property
    def dropped(self) -> int:
        """Return how many spans were not taken: there was no room for them, or the receiver failed."""
        return self.crowded_out + self.failed


class Sender:
    """Sends spans on a thread of its own. Use as a context manager, or call `close`."""

    def __init__(
        self, endpoint: str, resource: Mapping[str, str], *, waits: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Make ready to send. Raises ExportError where the SDK is missing, UsageError for an impossible endpoint.

        With `waits`, `offer` waits for room and raises ExportError once the receiver has failed several times in a row.
        A receiver that has taken nothing yet and refuses a connection is not there: then it raises at once, and so does
        the end of the block.
        """
        self.health = Health()
        self.resource = dict(resource)
        self._endpoint = endpoint
        self._waits = waits
        self._failures = 0
        self._has_taken = False
        self._is_refused = False
        self._rejected = 0
        self._is_explained = False  # whether the exporter has said why it could not send the batch in hand
        self._exporter = exporter(endpoint, timeout_s, self._note_rejected)
        self._translation = Translation()
        self._listening = _Failures(self._note_failure)
        self._queue: queue.Queue[list[Span] | None] = queue.Queue(QUEUE_REQUESTS)
        self._closing = threading.Event()
        self._over = threading.Event()
        logging.getLogger(_LOGGER).addHandler(self._listening)
        self._thread = threading.Thread(target=self._run, name="kvtrace-otlp", daemon=True)
        self._thread.start()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        self.close(None if self._waits and kind is None else FINISH_S)
        if kind is None:
            self._raise_if_refused()

    def offer(self, spans: list[Span]) -> None:
        """Take one request's spans over; they are dropped and counted where there is no room."""
        self._raise_if_refused()
        if self._waits and self._failures >= _FAILURES_MAX:
            taken = f"more spans after {plural(self.health.exported, 'span')}" if self._has_taken else "spans"
            raise ExportError(f"{self._endpoint} takes no {taken}: {self.health.failure or 'no reason given'}")
        try:
            self._queue.put(spans, block=self._waits)
        except queue.Full:
            self.health.crowded_out += len(spans)

    def _raise_if_refused(self) -> None:
        if self._is_refused:
            raise ExportError(
                f"{self._endpoint} takes no spans: it refuses connections; start the receiver, or name another endpoint"
            )

    def close(self, timeout_s: float | None = FINISH_S) -> None:
        """Send what is left and end. What is left after `timeout_s` is dropped. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # wakes the thread if it waits
        self._thread.join(timeout_s)
        # The thread takes no more; what it has in hand it still counts, as soon as the exporter lets go of it.
        self._over.set()
        if not self._is_refused:
            self._exporter.shutdown()
        self._thread.join(_LET_GO_S)
        while True:
            try:
                left = self._queue.get_nowait()
            except queue.Empty:
                break
            self.health.crowded_out += len(left or ())
        logging.getLogger(_LOGGER).removeHandler(self._listening)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                first = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            batch = self._batch(first)
            if batch:
                self._export(batch)

    def _batch(self, first: list[Span] | None) -> list[Span]:
        """Return what waits in the queue, as much as one message should hold."""
        batch = list(first or ())
        size_bytes = sum(map(_size_bytes, batch))
        for _ in range(_BATCH_REQUESTS):
            if size_bytes >= _BATCH_BYTES:
                break
            try:
                more = self._queue.get_nowait() or []
            except queue.Empty:
                break
            batch += more
            size_bytes += sum(map(_size_bytes, more))
        return batch

    def _export(self, batch: list[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        is_lost = self._closing.is_set() and self._failures >= _FAILURES_MAX
        if self._over.is_set() or self._is_refused or is_lost:
            self.health.failed += len(batch)
            return
        self._rejected = 0
        self._is_explained = False
        try:
            sent = self._exporter.export(self._translation.of(batch, self.resource)) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 -- whatever it is, the next batch is tried
            sent, self.health.failure = False, f"{type(error).__name__}: {error}"
        self._failures = 0 if sent else self._failures + 1
        self._has_taken |= sent
        if sent:
            rejected = min(self._rejected, len(batch))
            self.health.exported += len(batch) - rejected
            self.health.failed += rejected
        else:
            self.health.failed += len(batch)

    def _note_failure(self, message: str) -> None:
        """Take note of what an exporter logged; called from within `export`, and when it is shut down."""
        if self._is_refused:
            return
        if self._is_explained and _GIVEN_UP in message:
            return
        self._is_explained = True
        self.health.failure = message[:_REASON_LETTERS_MAX]
        if self._waits and not self._has_taken and _REFUSED in message:
            self._is_refused = True
            self._exporter.shutdown()  # it would try again for as long as it may wait for an answer

    def _note_rejected(self, spans: int, reason: str) -> None:
        """Take note of how many spans of a batch the receiver rejected; called from within `export`."""
        self._rejected = spans
        self.health.failure = f"the receiver rejected {plural(spans, 'span')} of a batch: {reason}"[
            :_REASON_LETTERS_MAX
        ]


def _size_bytes(span: Span) -> int:
    """Return about how large a span is in a message."""
    entries = sum(
        _VALUE_BYTES + (len(one.encode()) if isinstance(one, str) else 0)
        for value in span.attributes.values()
        for one in (value if isinstance(value, list) else (value,))
    )
    return _ENTRY_BYTES * (4 + len(span.attributes) + len(span.points)) + entries + len(span.error)


class _Failures(logging.Handler):
    """Passes on what the exporters log, which they do instead of raising."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the message on."""
        self._note(record.getMessage())
