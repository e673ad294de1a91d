"""Lifecycle log lines of vLLM's KV connectors (`KV_CONNECTOR_LIFECYCLE`, schema `vllm-kv-connector-v1`).

They stand among other lines of ordinary logs, also of logs that wrap each line in JSON, and name requests by hashes.
A line tells neither host nor process; how far its wall clock is from its monotonic clock tells hosts apart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvtrace import stages
from kvtrace.importers.identity import Known, is_hash
from kvtrace.importers.points import Imported, Part, Placed
from kvtrace.importers.source import Source, complaint, printable
from kvtrace.modes import PULL, PUSH
from kvtrace.wording import plural

if TYPE_CHECKING:
    from kvtrace.stages import Stage

NAME = "vllm-lifecycle"
SCHEMA = "vllm-kv-connector-v1"
_PREFIX = "KV_CONNECTOR_LIFECYCLE "
_PLAIN, _WRAPPED = (_PREFIX + "{").encode(), (_PREFIX + '{\\"').encode()
PRODUCER, CONSUMER = "producer", "consumer"
# A host reads its two clocks within this of each other, and keeps their distance until somebody sets the time.
_SAME_CLOCK_NS = 200_000_000
_CLOCKS_MAX = 64
_DECODER = json.JSONDecoder()
# (event, role) -> the point that it is. `transfer_started` comes before descriptors are made, hence no post.
_STAGES: dict[tuple[str, str], Stage] = {
    ("transfer_staged", PRODUCER): stages.PREFILL_FINISHED,
    ("transfer_staged", CONSUMER): stages.DECODE_ALLOCATED,
    ("registration_staged", CONSUMER): stages.DECODE_ALLOCATED,
    ("registration_queued", CONSUMER): stages.REGISTRATION_QUEUED,
    ("registration_sent", CONSUMER): stages.REGISTRATION_SENT,
    ("registration_received", PRODUCER): stages.REGISTRATION_RECEIVED,
    ("blocks_matched", PRODUCER): stages.MATCHED,
    ("transfer_started", PRODUCER): stages.TRANSFER_BEGUN,
    ("transfer_started", CONSUMER): stages.TRANSFER_BEGUN,
    ("transfer_completed", PRODUCER): stages.HANDED_OVER,
    ("transfer_completed", CONSUMER): stages.REPORTED,
    ("transfer_failed", PRODUCER): stages.LEASE_EXPIRED,
    ("transfer_failed", CONSUMER): stages.LOAD_FAILED,
}


class _Record(msgspec.Struct):
    schema: str
    event: str
    wall_ns: int
    monotonic_ns: int
    role: str
    request_id_hash: str
    request_group_id_hash: str
    transfer_mode: str = ""
    connector: str = ""
    remote_request_id_hash: str | None = None
    block_count: int | None = None


@dataclass(frozen=True, slots=True)
class _Sighting:
    """One line that is a point: which, what it says, and of which process of its file."""

    stage: Stage
    record: _Record
    part: str


@dataclass(slots=True)
class Log:
    """One file read: what will be placed of it, and its lines that are points."""

    placed: Imported
    sightings: list[_Sighting] = field(default_factory=list)


def recognise(head: bytes) -> bool:
    """Return whether lines of the schema are among these bytes."""
    return _PLAIN in head or _WRAPPED in head


def holds_lines(source: Source) -> bool:
    """Return whether any line of a file is one of the schema: in a log, the first may stand far down."""
    return any(recognise(text) for _, text in source.lines())


def read(source: Source, *, same_host: bool) -> Log:
    """Return the lines of a file that are points; `place` names their requests."""
    log = Log(Imported(source, NAME, 0))
    clocks: list[int] = []
    left_out: dict[str, int] = {}
    for line, text in source.lines():
        if not recognise(text):
            continue
        record = _record(source, line, text)
        log.placed.records += 1
        stage = _STAGES.get((record.event, record.role))
        if stage is None:
            name = printable(f"{record.role} {record.event}", 64)
            left_out[name] = left_out.get(name, 0) + 1
            continue
        clock = _clock(record.wall_ns - record.monotonic_ns, clocks)
        if len(clocks) > _CLOCKS_MAX:
            raise source.fault(
                line, f"its clocks are those of none of the {_CLOCKS_MAX} hosts before; split the file by host"
            )
        if same_host and len(clocks) > 1:
            raise source.fault(line, "its clocks are not those of the lines before, so --same-host does not hold")
        log.sightings.append(_Sighting(stage, record, _part(log.placed, record, clock)))
    if not log.placed.records:
        raise source.fault(1, f"neither this line nor any other is one of {SCHEMA}")
    for name, count in sorted(left_out.items()):
        log.placed.said.append(f"{plural(count, 'line')} ({name}) left out: no point known here")
    log.placed.said.append("tells no step, post or first token; a client's records or a router's give the ends")
    return log


def _record(source: Source, line: int, text: bytes) -> _Record:
    """Return the record in one line of a log; what stands before and behind it is passed over."""
    try:
        said = _unwrapped(text) if _WRAPPED in text else text.decode("utf-8", "replace")
        found = _DECODER.raw_decode(said, said.index(_PREFIX + "{") + len(_PREFIX))[0]
    except (ValueError, RecursionError) as error:
        raise source.fault(line, complaint(error)) from error
    record = source.convert(line, found, _Record)
    if record.schema != SCHEMA:
        raise source.fault(line, f"its schema is not {SCHEMA}")
    source.time_ns(line, "wall_ns", record.wall_ns)
    source.reading_ns(line, "monotonic_ns", record.monotonic_ns, 1)
    source.count(line, "block_count", record.block_count)
    named = (record.request_id_hash, record.request_group_id_hash, record.remote_request_id_hash)
    if not all(is_hash(one) for one in named if one is not None):
        raise source.fault(line, "a hash of a request's id is not 16 hexadecimal digits")
    return record


def _unwrapped(text: bytes) -> str:
    """Return the log line that a collector wrapped in JSON, "" if it is not there."""
    said = text.decode("utf-8", "replace")
    values: list[Any] = [_DECODER.raw_decode(said, said.index("{"))[0]]
    while values:
        value = values.pop()
        if isinstance(value, str) and _PREFIX in value:
            return value
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    return ""


def _clock(offset_ns: int, clocks: list[int]) -> int:
    """Return which of the clocks seen so far is `offset_ns` behind unix time, a new one if none is."""
    for index, seen_ns in enumerate(clocks):
        if abs(offset_ns - seen_ns) <= _SAME_CLOCK_NS:
            clocks[index] = offset_ns
            return index
    clocks.append(offset_ns)
    return len(clocks) - 1


def _part(placed: Imported, record: _Record, clock: int) -> str:
    """Return the name of the process that a record is taken to be of: one per role and clock."""
    name = f"{record.role}-{clock}"
    if name not in placed.parts:
        facts = {"kind": "engine", "role": f"kv_{record.role}", "connector": printable(record.connector, 64)}
        placed.parts[name] = Part({key: value for key, value in facts.items() if value}, str(clock))
    return name


def place(logs: list[Log], known: Known) -> None:
    """Name the requests of all logs and place their points: legs of one request may stand in different files."""
    sightings = [one for log in logs for one in log.sightings]
    consumers = {one.record.request_id_hash for one in sightings if one.record.role == CONSUMER}
    groups = _groups(sightings, consumers, known)
    for log in logs:
        named: dict[str, bool] = {}
        for one in log.sightings:
            own, other = _ids(one, consumers)
            group = one.record.request_group_id_hash
            request, named[own] = known.engine(own, groups.get(own, group))
            ref = known.engine(other, groups.get(other, group))[0] if other is not None else ""
            log.placed.points.append(_point(one, request, ref))
        log.placed.joined = sum(named.values())
        if log.placed.joined < len(named):
            unknown = f"{len(named) - log.placed.joined} of {plural(len(named), 'hashed id')}"
            log.placed.said.append(f"{unknown} joined no request known here: each keeps its hash")


def _ids(one: _Sighting, consumers: set[str]) -> tuple[str, str | None]:
    """Return whose point it is and the id on the other side.

    A match is P's request's, a registration that P received is D's; a producer's line may have its ids either way.
    """
    own, other = one.record.request_id_hash, one.record.remote_request_id_hash
    if one.record.role == PRODUCER and other is not None and (own in consumers) != (other in consumers):
        is_theirs = one.stage is stages.REGISTRATION_RECEIVED
        return (own, other) if (own in consumers) == is_theirs else (other, own)
    return own, other


def _groups(sightings: list[_Sighting], consumers: set[str], known: Known) -> dict[str, str]:
    """Return each id's group; the two legs of one request share theirs, whatever the front ends called them."""
    groups = {one.record.request_id_hash: one.record.request_group_id_hash for one in sightings}
    for one in sightings:
        own, other = _ids(one, consumers)
        if other in groups and own in groups:
            mine, theirs = groups[own], groups[other]
            groups[own] = groups[other] = theirs if theirs in known.by_group else mine
    return groups


def _point(one: _Sighting, request: str, other: str) -> Placed:
    record, blocks = one.record, one.record.block_count or 0
    ref, a, b = "", 0, 0
    if one.stage is stages.MATCHED:
        ref = other
    elif one.stage is stages.TRANSFER_BEGUN:
        ref = record.transfer_mode if record.transfer_mode in (PUSH, PULL) else ""
    elif one.stage is stages.PREFILL_FINISHED:
        a, b = blocks, 1  # it is logged only for blocks that are held
    elif one.stage is stages.DECODE_ALLOCATED:
        a = blocks
    elif one.stage is stages.LOAD_FAILED:
        b = blocks
    return Placed(record.wall_ns, one.stage, request, one.part, ref, a, b)
