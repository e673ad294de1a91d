"""What a finding says and what it is made from: plain values, so that every check is a function of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Grade(StrEnum):
    """How sure a finding is: read off the records, worked out from them, or likely in the light of experience."""

    MEASURED = "measured"
    EXPLAINED = "explained"
    SUPPOSED = "supposed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One plain sentence about a run, with what it rests on. `stake_ns` is request time that it is about, summed.

    `kind` is the class that it counts for and `remedy` what usually helps; both are "" where neither can be told.
    `mode` and `scope` say whose requests it is about, "" those of the whole run.
    """

    name: str
    sentence: str
    grade: Grade
    kind: str
    remedy: str
    stake_ns: int
    query: str
    examples: tuple[str, ...]
    mode: str = ""
    scope: str = ""


@dataclass(frozen=True, slots=True)
class CauseFacts:
    """One cause on the critical paths of a group: how often, how long (ns), and the ids with the most of it.

    A p90 lies between the two requests next to it, as a median does; 0 where nobody asked.
    """

    requests: int
    total_ns: int
    median_ns: int
    examples: tuple[str, ...] = ()
    p90_ns: int = 0


@dataclass(frozen=True, slots=True)
class Late:
    """Registrations of a push group: how many were told, how many late, by how much (ns: median, p90), what for."""

    told: int = 0
    late: int = 0
    median_ns: int = 0
    waited_for: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    p90_ns: int = 0


@dataclass(frozen=True, slots=True)
class Posting:
    """Requests of a group that waited for a post: time in it (ns: sum, p90), at most on the wire (sum).

    Transfers, descriptors and bytes are those of all ranks, of which the path has the slowest only.
    """

    requests: int = 0
    transfers: int = 0
    post_ns: int = 0
    wire_high_ns: int = 0
    descriptors: int = 0
    moved_bytes: int = 0
    examples: tuple[str, ...] = ()
    p90_ns: int = 0


@dataclass(frozen=True, slots=True)
class Detection:
    """Arrivals noticed late: requests, what no bracket doubts of it (ns: sum, median, p90), D's median step."""

    requests: int = 0
    total_ns: int = 0
    median_ns: int = 0
    step_ns: int = 0
    examples: tuple[str, ...] = ()
    p90_ns: int = 0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank of one engine that the others wait for: in how many requests, and for how long (ns: sum, median, p90)."""

    engine: str
    rank: int
    requests: int
    last: int
    total_ns: int
    median_ns: int
    examples: tuple[str, ...] = ()
    p90_ns: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that P kept after the request had ended for the client: requests, time (ns: sum, longest), ids."""

    requests: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retried:
    """Requests that are further attempts at lost ones: how many, the time before them (ns: sum, median, p90), ids."""

    requests: int = 0
    total_ns: int = 0
    median_ns: int = 0
    examples: tuple[str, ...] = ()
    p90_ns: int = 0


@dataclass(frozen=True, slots=True)
class Pacing:
    """Time after the first token in a group (ns, summed), and what connector work made of it."""

    requests: int = 0
    decode_ns: int = 0
    extension_ns: int = 0
    by_others_ns: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The facts of all requests of one mode and scope that had a first token. Verdicts count every request.

    `legs` has the time `between` P's leg and D's, and that for which the answer was `held` until P's reply was in.
    """

    mode: str
    scope: str
    requests: int
    ttft_ns: int
    causes: Mapping[str, CauseFacts] = field(default_factory=dict)
    verdicts: Mapping[str, CauseFacts] = field(default_factory=dict)
    legs: Mapping[str, CauseFacts] = field(default_factory=dict)
    late: Late = Late()
    posting: Posting = Posting()
    detection: Detection = Detection()
    pacing: Pacing = Pacing()


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a run: its groups, and what belongs to no group. Rates in requests/s, None where too few.

    `saturated` says that less was served than offered, so that waiting grew everywhere.
    """

    groups: tuple[Group, ...]
    stragglers: tuple[Straggler, ...] = ()
    held: Held = Held()
    retried: Retried = Retried()
    lost_records: int = 0
    offered_rate_hz: float | None = None
    served_rate_hz: float | None = None
    saturated: bool = False
