"""What the analysis speaks of: events, processes, requests, segments. Frozen values without behaviour of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtrace.modes import UNKNOWN

NEVER_NS = 2**63 - 1
"""Later than any time, in unix ns."""


class Event(NamedTuple):
    """One recorded point. `t_ns` is unix time in ns; the payload's meaning is declared in `kvtrace.stages`."""

    t_ns: int
    stage: str
    process: int
    request: str
    ref: str
    a: int
    b: int
    c: int
    d: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process that emitted; those of one `domain` share a clock. Without an engine `engine` is "".

    `imported` is the format that its points were imported from, "" for a process that kvtrace recorded. The most
    tokens and requests that its scheduler puts into a step are 0 where it is none or does not say.
    """

    process: int
    kind: str
    engine: str
    domain: str
    offset_ns: int = 0
    tp_size: int = 1
    imported: str = ""
    max_tokens: int = 0
    max_requests: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One point on one request's graph: when, and on whose clock."""

    t_ns: int
    process: int


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: times in unix ns, 0 where nobody stamped it; forwards and connectors are the last rank's.

    `connector_ns` is the longest that a rank's connector took on the forward thread, in the process `slowest`.
    `ranks` are (when it was through with the step, rank), in that order, of an engine that has several. Before it was
    made up, the scheduler's thread had been without a processor for `starved_ns`, and behind it for `starved_after_ns`.
    A worker's was so in the forward, in the connector's work behind it and until the result was there (the worst rank).
    """

    step: int
    scheduled_ns: int
    started_ns: int
    forwarded_ns: int
    connected_ns: int
    ended_ns: int
    connector_ns: int
    before_forward_ns: int
    tokens: int
    requests: int
    slowest: int = 0
    ranks: tuple[tuple[int, int], ...] = ()
    starved_ns: int = 0
    starved_after_ns: int = 0
    forward_starved_ns: int = 0
    connector_starved_ns: int = 0
    result_starved_ns: int = 0


class Handshake(NamedTuple):
    """One exchange of agent metadata: when, in unix ns, with which engine, begun by which process."""

    start_ns: int
    end_ns: int
    peer: str
    process: int = 0


class Limits(NamedTuple):
    """The most tokens and requests that a scheduler puts into a step, 0 where they are not known."""

    tokens: int = 0
    requests: int = 0


class Look(NamedTuple):
    """A look of a scheduler at a request that got no blocks: when, and since when it was queued. Unix ns."""

    t_ns: int
    enqueued_ns: int


class Awake(NamedTuple):
    """One stretch in which a sender thread was awake. Unix ns."""

    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Transfer:
    """One transfer of one rank pair, as the side that drives it saw it. Times in unix ns, 0 where unseen.

    `remote_process` is the worker on D that was told of a write, where it is known whose write it was told of.
    """

    process: int
    number: int
    rank: int = 0
    prepared_ns: int = 0
    post_started_ns: int = 0
    post_ended_ns: int = 0
    done_at_post: bool = False
    last_pending_ns: int = 0
    done_ns: int = 0
    probed_ns: int = 0
    failed: bool = False
    moved_bytes: int = 0
    descriptors: int = 0
    remote_request: str = ""
    remote_process: int = 0
    notified_ns: int = 0
    reason: str = ""


class Lost(NamedTuple):
    """An earlier attempt at the same request that ended without an answer, until the next began. Unix ns."""

    request_id: str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Request:
    """One attempt of one request: every event that belongs to it, and where its legs ran.

    `base_id` is the id that its front ends were sent; `lost` are the attempts before it, oldest first.
    """

    request_id: str
    base_id: str = ""
    client_request_id: str = ""
    attempt: int = 0
    join_method: str = ""
    mode: str = UNKNOWN
    prefill_engine: str = ""
    decode_engine: str = ""
    events: dict[str, list[Event]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    lost: tuple[Lost, ...] = ()

    @property
    def first_ns(self) -> int:
        """Return when it is first seen, unix ns; 0 without events."""
        return min((events[0].t_ns for events in self.events.values()), default=0)


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of the critical path, charged to one cause. Unix ns, half open."""

    start_ns: int
    end_ns: int
    cause: str
    waited_for: str
    crosses_hosts: bool = False


@dataclass(frozen=True, slots=True)
class Hidden:
    """Work beside the path: how long it took and by how much it could have grown unnoticed. Nanoseconds."""

    cause: str
    start_ns: int
    duration_ns: int
    slack_ns: int


class Posted(NamedTuple):
    """One call that posted a transfer: when, in unix ns, for which request, in which process."""

    start_ns: int
    end_ns: int
    request_id: str
    process: int = 0


@dataclass(slots=True)
class Pace:
    """How the tokens after the first came. Times in ns; `parts_ns` maps causes to times that sum to end minus start.

    `itl_ns` are the times between the steps that made tokens: one a step, also where a step makes several tokens.
    `extension_ns` is by how much connector work on the forward thread made these steps longer, `occupancy_ns` how long
    it took there. `blame_ns` gives, by request, the part of the extension in which that request's transfers were
    posted, or its KV copied; it may be the request itself, and what is left is the connector's other work.
    """

    start_ns: int
    end_ns: int
    tokens: int = 0
    parts_ns: dict[str, int] = field(default_factory=dict)
    itl_ns: list[int] = field(default_factory=list)
    extension_ns: int = 0
    occupancy_ns: int = 0
    blame_ns: dict[str, int] = field(default_factory=dict)

    @property
    def tpot_ns(self) -> int | None:
        """Return the mean time per token after the first, in ns; None where there was no such token."""
        return (self.end_ns - self.start_ns) // self.tokens if self.tokens else None


class Blocks(NamedTuple):
    """What a hand-off kept occupied, and how long in ns; None where an end of that time was not seen.

    `reserved` is D's, from their allocation until the KV was there; `held` is P's, from its finishing until it let go,
    and `held_after_end_ns` the part of it after the request was over without a whole answer: aborted or failed.
    """

    reserved_blocks: int = 0
    reserved_ns: int | None = None
    held_blocks: int = 0
    held_ns: int | None = None
    held_after_end_ns: int | None = None


class Prefix(NamedTuple):
    """Prompt tokens that D did not have to compute: of its own cache, and of P; None where D was not seen to look."""

    cached: int | None = None
    remote: int | None = None


class Straggler(NamedTuple):
    """The rank of D that kept the others waiting, for how long in ns, and which rank reported the KV last."""

    rank: int
    waited_ns: int
    last: int


class Integrity(NamedTuple):
    """What checksums say of the blocks handed over: how many were compared, which differ, how many were not.

    A block that differs is (rank, the block's number on the side that does not drive the transfer); `why` are the
    reasons for those that were not compared.
    """

    checked: int = 0
    corrupt: tuple[tuple[int, int], ...] = ()
    unchecked: int = 0
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attribution:
    """The answer for one request. Shares sum to `ttft_ns`; without a first token that is None and they are 0.

    `prompt_tokens` and `output_tokens` are None where nobody said how many there were.
    `idle_ns` is how long the first engine had made no step when the request came to it, None where that is unknown;
    `integrity` is None where no checksums were to be taken, `straggler` where D has one rank.
    """

    request: Request
    verdict: str
    scope: str
    note: str
    start_ns: int
    first_token_ns: int | None
    end_ns: int
    segments: tuple[Segment, ...]
    hidden: tuple[Hidden, ...]
    shares_ns: dict[str, int]
    transfer_low_ns: int
    transfer_high_ns: int
    registration_late_ns: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    blocks: Blocks = field(default_factory=Blocks)
    pace: Pace | None = None
    idle_ns: int | None = None
    integrity: Integrity | None = None
    straggler: Straggler | None = None
    prefix: Prefix = field(default_factory=Prefix)

    @property
    def ttft_ns(self) -> int | None:
        """Return first token minus start in ns, None when no first token was seen."""
        return None if self.first_token_ns is None else self.first_token_ns - self.start_ns
