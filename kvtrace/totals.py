"""vLLM's own totals beside those of the store: the same counts from two sources, and why they differ where they do.

A difference that no rule explains is said to be unexplained: then one of the two has lost or doubled something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtrace.wording import plural

AGREES = ""
UNEXPLAINED = "unexplained"
SILENT = "its /metrics did not answer before and after the load"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the store counts of one engine; bytes, tokens and so on summed over all its requests and transfers.

    `departed` are the requests that it finished although their peer had left its HTTP server before the answer's end.
    `unfinished_prompt_tokens` are those of requests that the engine was not seen to finish, and of departed ones.
    """

    requests: int = 0
    departed: int = 0
    prompt_tokens: int = 0
    unfinished_prompt_tokens: int = 0
    transfers: int = 0
    moved_bytes: int = 0
    descriptors: int = 0
    failed_transfers: int = 0
    expired: int = 0
    late_notifications: int = 0
    lost_records: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """One total: its name here, vLLM's sample, the labels that count ({} for all), and the store's count."""

    name: str
    sample: str
    labels: Mapping[str, tuple[str, ...]]
    of: Callable[[Recorded], int]


_FINISHED = {"finished_reason": ("stop", "length", "repetition")}
METRICS: tuple[Metric, ...] = (
    Metric("requests finished", "vllm:request_success_total", _FINISHED, lambda one: one.requests),
    Metric("prompt tokens", "vllm:prompt_tokens_total", {}, lambda one: one.prompt_tokens),
    Metric("transfers", "vllm:nixl_bytes_transferred_count", {}, lambda one: one.transfers),
    Metric("bytes", "vllm:nixl_bytes_transferred_sum", {}, lambda one: one.moved_bytes),
    Metric("descriptors", "vllm:nixl_num_descriptors_sum", {}, lambda one: one.descriptors),
    Metric("failed transfers", "vllm:nixl_num_failed_transfers_total", {}, lambda one: one.failed_transfers),
    Metric("expired leases", "vllm:nixl_num_kv_expired_reqs_total", {}, lambda one: one.expired),
    Metric(
        "late notifications", "vllm:nixl_num_notifications_after_expiry_total", {}, lambda one: one.late_notifications
    ),
)
_LOST = "lost"
_SUMS = ("prompt tokens", "bytes", "descriptors")
_BY_TELEMETRY = ("transfers", "bytes", "descriptors")


@dataclass(frozen=True, slots=True)
class Total:
    """One total of one engine from both sources, and why they differ: "" where they agree."""

    engine: str
    name: str
    vllm: int | None
    kvtrace: int
    why: str

    @property
    def agrees(self) -> bool:
        """Return whether both sources say the same."""
        return self.why == AGREES

    @property
    def is_explained(self) -> bool:
        """Return whether they agree, or a rule says why they do not."""
        return self.why != UNEXPLAINED

    @property
    def is_a_difference(self) -> bool:
        """Return whether one of the two has lost something or may have: no rule explains it, or lost records do."""
        return not self.is_explained or self.why.endswith(_LOST)


def compare(said: Mapping[str, Mapping[str, float]], recorded: Mapping[str, Recorded]) -> list[Total]:
    """Return every total of every engine; `said` maps ids of those that said theirs to values by `Metric.name`."""
    found = []
    for engine in sorted(said.keys() | recorded.keys()):
        values, ours = said.get(engine), recorded.get(engine, Recorded())
        for metric in METRICS:
            value = None if values is None else values.get(metric.name)
            theirs, own = None if value is None else round(value), metric.of(ours)
            found.append(Total(engine, metric.name, theirs, own, _why(metric.name, theirs, own, values, ours)))
    return found


def _why(name: str, theirs: int | None, own: int, values: Mapping[str, float] | None, ours: Recorded) -> str:
    """Return why the two differ, by the first rule that fits."""
    if values is None:
        return SILENT
    if theirs == own:
        return AGREES
    if theirs is None:
        return "this vLLM has no such metric"
    if name in _BY_TELEMETRY and ours.transfers and not any(values.get(other) for other in _BY_TELEMETRY):
        return "vLLM counts transfers by NIXL's telemetry, which is off"
    are_same = values.get("transfers") == ours.transfers and values.get("bytes") == ours.moved_bytes
    # However many it joins, one of a transfer is left.
    if name == "descriptors" and 0 < ours.transfers <= theirs < own and are_same:
        return "NIXL joins neighbouring descriptors and counts them as one; transfers and bytes are the same"
    if name == "requests finished" and 0 < own - theirs <= ours.departed:
        return "vLLM does not count a request whose client leaves while the engine finishes it"
    if name == "prompt tokens" and 0 < own - theirs <= ours.unfinished_prompt_tokens:
        return "vLLM counts a prompt when its first token is made; these requests ended before"
    # One lost record can hide many tokens and bytes, and no more than one request or transfer.
    most = float("inf") if name in _SUMS else ours.lost_records
    if ours.lost_records and 0 < theirs - own <= most:
        return f"{plural(ours.lost_records, 'record of this engine was', 'records of this engine were')} {_LOST}"
    return UNEXPLAINED
