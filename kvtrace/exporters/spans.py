"""What a trace is made of: spans, links, and where a request stands in its trace.

Pure values: what makes, sends or writes them stands elsewhere. Ids derive from the request: exporting again gives the
same spans.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from kvtrace import stages
from kvtrace.exporters.names import own

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrace.exporters.source import Told
    from kvtrace.model import Event
    from kvtrace.store import Store

Value = str | bool | int | float | list[str] | list[int]

_HALF_BITS = 64
_MASK = (1 << _HALF_BITS) - 1


class Kind(IntEnum):
    """OpenTelemetry's span kinds, as its protocol numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class Link:
    """A cause outside the span's own line of parents."""

    span_id: int
    reason: str


@dataclass(slots=True)
class Span:
    """One span; `service` is router, prefill or decode, and `instance` the engine. Times in unix ns."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    service: str
    instance: str
    start_ns: int
    end_ns: int
    kind: Kind = Kind.INTERNAL
    attributes: dict[str, Value] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    points: list[tuple[int, str]] = field(default_factory=list)
    error: str = ""
    sampled: bool = True


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request stands in its trace: the trace, its parent, its own span."""

    trace_id: int
    parent_id: int
    span_id: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all spans of a run share: what tells it from other runs, the model, attributes of every resource."""

    run: str = ""
    model: str = ""
    resource: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store) -> RunFacts:
        """Return what the store says of its run."""
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
        resource = {own(f"run.{name}"): facts[name] for name in _RESOURCE_FACTS if facts.get(name)}
        return cls(facts.get("created_ns", ""), facts.get("model", ""), resource)


_RESOURCE_FACTS = ("vllm", "nixl", "connector", "mode", "device", "tp_size", "created_ns")


def origin(told: Told, run: str) -> Origin:
    """Return the place that the router recorded, else one derived from the request and the run that it belongs to."""
    row = told.row
    identity = f"{run}\0{row['request_id']}\0{row['attempt']}\0{row['start_ns']}"
    traced = told.first(stages.ROUTER_TRACED)
    if traced is None:
        digest = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        return Origin(int.from_bytes(digest) or 1, 0, span_id(identity, "request"), sampled=True)
    trace_id = (traced.a & _MASK) << _HALF_BITS | (traced.b & _MASK)
    own_span = traced.d & _MASK or span_id(identity, "request")
    return Origin(trace_id, traced.c & _MASK, own_span, sampled=_is_sampled(traced))


def _is_sampled(traced: Event) -> bool:
    try:
        return bool(int(traced.ref, 16) & 1)
    except ValueError:
        return True


def span_id(identity: str, part: str) -> int:
    """Return the id of one part of a request, never 0: the same whenever it is asked for."""
    return int.from_bytes(hashlib.blake2b(f"{identity}\0{part}".encode(), digest_size=8).digest()) or 1
