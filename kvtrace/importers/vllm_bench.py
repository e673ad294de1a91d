"""The result of `vllm bench serve --save-result --save-detailed`: lists, one entry per request, in one JSON document.

Its start times are readings of the load host's monotonic clock, and it names no request. So it needs an anchor: the
clock of the store's own host (`--same-host`), else the date of the file. That is the load host's local time to the
second, without its zone: metadata `utc_offset` says it. It joins requests only if the ids can be told: a list
`request_ids`, or `request_id_prefix` among the metadata.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import NamedTuple

import msgspec

from kvtrace.importers.clients import ClientRecord
from kvtrace.importers.source import Source, complaint

NAME = "vllm-bench"
_S_NS = 1_000_000_000
_DATE = "%Y%m%d-%H%M%S"
_FAILED = "error"
_BY_DATE = "is placed by its date, to a second at best; --same-host places it exactly where that holds"
_BY_LOCAL_DATE = (
    "has a date in its host's local time, read as UTC, so it may be hours off; run it with "
    "--metadata utc_offset=+02:00 (its own offset), or import it with --same-host where that holds"
)


class _Result(msgspec.Struct):
    start_times: list[float]
    ttfts: list[float]
    itls: list[list[float]] = []
    latencies: list[float] = []
    input_lens: list[float] = []
    output_lens: list[float] = []
    errors: list[str | None] = []
    request_ids: list[str] = []
    request_id_prefix: str | None = None
    date: str = ""
    utc_offset: str | None = None


class _Span(NamedTuple):
    """When a request began on the file's clock, its time to the first token, its whole time, in ns."""

    started_ns: int
    ttft_ns: int
    taken_ns: int


def recognise(head: bytes) -> bool:
    """Return whether a file that begins so is a result of vllm bench serve."""
    return (b'"tokenizer_id"' in head and b'"num_prompts"' in head) or (b'"start_times"' in head and b'"ttfts"' in head)


def read(source: Source, clock_offset_ns: int | None) -> tuple[list[ClientRecord], list[str]]:
    """Return the records of a file and what they lack; `clock_offset_ns` makes unix times of its host's clock."""
    records: list[ClientRecord] = []
    said: list[str] = []
    for line, document in _documents(source):
        if isinstance(document, dict) and "start_times" not in document:
            raise source.fault(line, "holds no single requests; run it with --save-result --save-detailed")
        result = source.convert(line, document, _Result)
        _check_lengths(source, line, result)
        spans = [_span(source, line, result, index) for index in range(len(result.start_times))]
        offset_ns = _dated(source, line, result, spans) if clock_offset_ns is None else clock_offset_ns
        records += [_record(source, line, result, index, span, offset_ns) for index, span in enumerate(spans)]
        if not result.request_ids and result.request_id_prefix is None:
            said.append("names no request, so nothing joins; run it with --metadata request_id_prefix=PREFIX")
        if clock_offset_ns is None:
            said.append(_BY_DATE if result.utc_offset is not None else _BY_LOCAL_DATE)
    return records, list(dict.fromkeys(said))


def _documents(source: Source) -> list[tuple[int, object]]:
    """Return the file's JSON documents with the line that each begins in: one, or one a line as --append-result."""
    try:
        return [(1, json.loads(source.whole()))]
    except (ValueError, RecursionError) as error:
        whole = error
    documents: list[tuple[int, object]] = []
    for number, line in source.lines():
        try:
            documents.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            # Where not even the first line is a document, the file is one document over many lines.
            told = error if documents else whole
            where = _line_of(whole) if told is whole and isinstance(whole, json.JSONDecodeError) else number
            raise source.fault(where, complaint(told)) from error
    return documents


def _line_of(error: json.JSONDecodeError) -> int:
    """Return the line of an error, the last that is not blank where the document ends too early."""
    return min(error.lineno, error.doc.rstrip().count("\n") + 1)


def _check_lengths(source: Source, line: int, result: _Result) -> None:
    """Raise unless all lists that are there tell of the same requests."""
    count = len(result.start_times)
    for name in ("ttfts", "itls", "latencies", "input_lens", "output_lens", "errors", "request_ids"):
        entries = len(getattr(result, name))
        if entries != count and (entries or name == "ttfts"):
            raise source.fault(line, f"{name} has {entries} entries and start_times {count}")


def _span(source: Source, line: int, result: _Result, index: int) -> _Span:
    """Return the times of one request, each of them possible."""
    if result.latencies:
        taken_s = result.latencies[index]
    else:
        taken_s = result.ttfts[index] + (sum(result.itls[index]) if result.itls else 0.0)
    return _Span(
        source.reading_ns(line, f"start_times[{index}]", result.start_times[index], _S_NS),
        source.duration_ns(line, f"ttfts[{index}]", result.ttfts[index], _S_NS),
        source.duration_ns(line, f"the time of request {index}", taken_s, _S_NS),
    )


def _dated(source: Source, line: int, result: _Result, spans: list[_Span]) -> int:
    """Return what to add to the file's clock so that its last answer ends at its date."""
    try:
        ended = dt.datetime.strptime(result.date, _DATE)  # noqa: DTZ007 -- the file has its zone elsewhere, or nowhere
    except ValueError as error:
        reason = "its times are of the load host's own clock and it has no date; use --same-host with that host's store"
        raise source.fault(line, reason) from error
    try:
        zone = dt.datetime.strptime(result.utc_offset or "Z", "%z").tzinfo
    except ValueError as error:
        raise source.fault(line, f"utc_offset {result.utc_offset!r} is none; write it like +02:00") from error
    ended = ended.replace(tzinfo=zone)
    last_ns = max((span.started_ns + span.taken_ns for span in spans), default=0)
    return int(ended.timestamp()) * _S_NS - last_ns


def _record(source: Source, line: int, result: _Result, index: int, span: _Span, offset_ns: int) -> ClientRecord:
    sent_ns = source.time_ns(line, f"start_times[{index}]", span.started_ns + offset_ns)
    is_failed = bool(result.errors and result.errors[index])
    if result.request_ids:
        client_id = result.request_ids[index]
    else:
        client_id = "" if result.request_id_prefix is None else f"{result.request_id_prefix}{index}"
    done_ns = sent_ns + (max(span.taken_ns, span.ttft_ns) if is_failed else span.taken_ns)

    def count(name: str, counts: list[float]) -> int:
        return source.count(line, f"{name}[{index}]", counts[index] if counts else None)

    return ClientRecord(
        line=index,
        client_id=client_id,
        sent_ns=sent_ns,
        first_token_ns=source.within(line, sent_ns + span.ttft_ns, done_ns) if span.ttft_ns else None,
        done_ns=done_ns,
        prompt_tokens=count("input_lens", result.input_lens),
        output_tokens=count("output_lens", result.output_lens),
        failure=_FAILED if is_failed else "",
    )
