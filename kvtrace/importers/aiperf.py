"""AIPerf's profile_export.jsonl: one record per request, with the id that it sent as X-Request-ID."""

from __future__ import annotations

import msgspec

from kvtrace.importers.clients import ClientRecord
from kvtrace.importers.source import Source
from kvtrace.legs import CANCELLED

NAME = "aiperf"
_UNIT_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "sec": 1_000_000_000}


class _Value(msgspec.Struct):
    value: float
    unit: str = "ms"


class _Metrics(msgspec.Struct):
    time_to_first_token: _Value | None = None
    input_sequence_length: _Value | None = None
    output_sequence_length: _Value | None = None


class _Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int
    x_request_id: str | None = None
    was_cancelled: bool = False


class _Error(msgspec.Struct):
    code: int | None = None
    type: str | None = None


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: _Metrics
    error: _Error | None = None


def recognise(head: bytes) -> bool:
    """Return whether a file that begins so is one of AIPerf's."""
    return b'"metadata"' in head and b'"request_start_ns"' in head


def read(source: Source) -> list[ClientRecord]:
    """Return the records of a file; raise SourceError for a line that is none."""
    return [_record(source, number, source.decode(number, line, _Record)) for number, line in source.lines()]


def _record(source: Source, line: int, record: _Record) -> ClientRecord:
    about, metrics = record.metadata, record.metrics
    sent_ns = source.time_ns(line, "request_start_ns", about.request_start_ns)
    done_ns = source.time_ns(line, "request_end_ns", about.request_end_ns)
    if done_ns < sent_ns:
        raise source.fault(line, "request_end_ns is before request_start_ns")
    first_token_ns = None
    if (taken := metrics.time_to_first_token) is not None:
        if taken.unit not in _UNIT_NS:
            raise source.fault(line, "time_to_first_token has a unit that is none of " + ", ".join(_UNIT_NS))
        taken_ns = source.duration_ns(line, "time_to_first_token", taken.value, _UNIT_NS[taken.unit])
        first_token_ns = source.within(line, sent_ns + taken_ns, done_ns)
    failure = CANCELLED if about.was_cancelled else ""
    if record.error is not None and not failure:
        failure = record.error.type or "error"
    return ClientRecord(
        line=line,
        client_id=about.x_request_id or "",
        sent_ns=sent_ns,
        first_token_ns=first_token_ns,
        done_ns=done_ns,
        prompt_tokens=source.count(line, "input_sequence_length", _number(metrics.input_sequence_length)),
        output_tokens=source.count(line, "output_sequence_length", _number(metrics.output_sequence_length)),
        status=_status(record.error),
        failure=failure,
    )


def _number(value: _Value | None) -> float | None:
    return value.value if value is not None else None


def _status(error: _Error | None) -> int:
    code = error.code if error is not None else None
    return code if code is not None and 0 < code < 1000 else 0
