"""Every Prometheus metric of kvtrace, declared once, as values.

The endpoint, the README's list and the Live dashboard derive from `METRICS`. Units are Prometheus's own (seconds,
bytes), names follow its conventions, and every label has a closed or a capped set of values: never a request id.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtrace import stages
from kvtrace.verdict import VERDICTS


class Kind(StrEnum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label: its values where they are a closed set, else the most that it may take before the rest is OTHER."""

    name: str
    doc: str
    values: tuple[str, ...] = ()
    values_max: int = 0

    @property
    def bound(self) -> int:
        """Return how many values the label can have at most, OTHER among them."""
        return (len(self.values) or self.values_max) + 1


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name as it is exposed, kind, sentence, labels; upper bounds of the buckets of a histogram."""

    name: str
    kind: Kind
    doc: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def series_max(self) -> int:
        """Return how many series it can have at most, a histogram's buckets, sum and count among them."""
        combinations = 1
        for label in self.labels:
            combinations *= label.bound
        return combinations * (len(self.buckets) + 3 if self.kind is Kind.HISTOGRAM else 1)


OTHER = "other"
"""What a label says instead of a value beyond its set or its cap."""

ENGINES_MAX = 64

MODE = Label("mode", "How the KV was handed over.", ("push", "pull", "local", "unknown"))
SCOPE = Label("scope", "Where the first token was seen; scopes do not compare.", ("client", "router", "engine"))
CLASS = Label("class", "What the request was doing.", tuple(kind.value for kind in stages.Class))
CAUSE = Label("cause", "The finer name; the README has the table.", tuple(cause.name for cause in stages.CAUSES))
VERDICT = Label("verdict", "What became of the hand-off.", tuple(VERDICTS))
ENGINE = Label("engine", f"Engine id; beyond {ENGINES_MAX} of them: {OTHER}.", values_max=ENGINES_MAX)
FAULTS: dict[str, stages.Stage] = {
    "transfer_failed": stages.TRANSFER_FAILED,
    "load_failed": stages.LOAD_FAILED,
    "lease_expired": stages.LEASE_EXPIRED,
    "notification_orphaned": stages.ORPHANED,
    "request_failed": stages.ROUTER_FAILED,
    "request_cancelled": stages.ROUTER_CANCELLED,
    "prefill_preempted": stages.PREFILL_PREEMPTED,
    "decode_preempted": stages.DECODE_PREEMPTED,
    "tracing_disabled": stages.DISABLED,
}
"""The values of label `fault` and the stage that each counts."""
FAULT = Label("fault", "What went wrong.", tuple(FAULTS))
FATE = Label("fate", "What became of a span.", ("exported", "dropped"))
VERSION = Label("version", "kvtrace's version.", values_max=1)

_SECONDS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.5, 5.0, 10.0, 30.0)
_PART_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TOKENS = (128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)

# Requests: counted once each, when they have ended and their last points are in.
REQUESTS = Metric("kvtrace_requests_total", Kind.COUNTER, "Requests that have ended.", (MODE, SCOPE, VERDICT))
TTFT = Metric("kvtrace_ttft_seconds", Kind.HISTOGRAM, "Time to first token.", (MODE, SCOPE), _SECONDS)
TTFT_CLASS = Metric(
    "kvtrace_ttft_class_seconds",
    Kind.HISTOGRAM,
    "The part of the time to first token that a class took; the classes of one request sum to its TTFT.",
    (CLASS, MODE, SCOPE),
    _PART_SECONDS,
)
CAUSES = Metric(
    "kvtrace_ttft_cause_seconds_total",
    Kind.COUNTER,
    "Time to first token charged to a cause.",
    (CAUSE, CLASS, MODE),
)
TRANSFER_LOW = Metric(
    "kvtrace_ttft_transfer_low_seconds_total", Kind.COUNTER, "The least that the transfers on the path took.", (MODE,)
)
TRANSFER_HIGH = Metric(
    "kvtrace_ttft_transfer_high_seconds_total", Kind.COUNTER, "The most that the transfers on the path took.", (MODE,)
)
HIDDEN = Metric(
    "kvtrace_hidden_seconds_total",
    Kind.COUNTER,
    "Work beside the critical path, which delayed nobody.",
    (CAUSE,),
)
PROMPT = Metric("kvtrace_prompt_tokens", Kind.HISTOGRAM, "Length of the prompts.", (MODE,), _TOKENS)
OUTPUT = Metric("kvtrace_output_tokens_total", Kind.COUNTER, "Tokens produced.", (MODE,))
LATE = Metric(
    "kvtrace_late_registrations_total",
    Kind.COUNTER,
    "Requests whose registration could be read only after P had computed (push).",
)
TPOT = Metric(
    "kvtrace_tpot_seconds",
    Kind.HISTOGRAM,
    "Mean time per output token after the first, per request.",
    (MODE,),
    _TOKEN_SECONDS,
)
TPOT_EXTENSION = Metric(
    "kvtrace_tpot_extension_seconds_total",
    Kind.COUNTER,
    "By how much connector work on the forward thread made decode steps longer, summed over the requests in them.",
    (MODE,),
)

# Hand-offs of these requests.
TRANSFERS = Metric("kvtrace_transfers_total", Kind.COUNTER, "Transfers: one per pair of ranks.", (MODE,))
MOVED_BYTES = Metric("kvtrace_transferred_bytes_total", Kind.COUNTER, "Bytes of KV moved.", (MODE,))
DESCRIPTORS = Metric("kvtrace_transfer_descriptors_total", Kind.COUNTER, "Descriptors of the transfers.", (MODE,))
RESERVED = Metric(
    "kvtrace_reserved_block_seconds_total",
    Kind.COUNTER,
    "Blocks reserved on D before the KV was there, times how long.",
    (MODE,),
)
HELD = Metric(
    "kvtrace_held_block_seconds_total", Kind.COUNTER, "Blocks that P kept for a hand-off, times how long.", (MODE,)
)

# Engines: as their events come in.
FAULT_COUNT = Metric("kvtrace_faults_total", Kind.COUNTER, "What went wrong, as it was recorded.", (FAULT,))
HANDSHAKES = Metric("kvtrace_handshakes_total", Kind.COUNTER, "Exchanges of agent metadata that have ended.", (ENGINE,))
STEPS = Metric("kvtrace_steps_total", Kind.COUNTER, "Engine steps made up.", (ENGINE,))
STEP_TOKENS = Metric("kvtrace_step_tokens_total", Kind.COUNTER, "Tokens in the engine steps.", (ENGINE,))
CONNECTOR = Metric(
    "kvtrace_connector_seconds_total",
    Kind.COUNTER,
    "Time that the connector took on the forward thread, over all ranks.",
    (ENGINE,),
)
RUNNING = Metric("kvtrace_step_requests", Kind.GAUGE, "Requests in the engine's last step.", (ENGINE,))
WAITING = Metric("kvtrace_waiting_for_kv_requests", Kind.GAUGE, "Requests known to wait for KV then.", (ENGINE,))

# The recorder itself.
EVENTS = Metric("kvtrace_recorder_events_total", Kind.COUNTER, "Events taken in.")
LOST = Metric("kvtrace_recorder_lost_records_total", Kind.COUNTER, "Records that traced processes could not keep.")
LAG = Metric("kvtrace_recorder_lag_seconds", Kind.GAUGE, "Age of the newest event when it was committed.")
PROCESSES = Metric("kvtrace_recorder_processes", Kind.GAUGE, "Processes seen so far.")
PUBLISHED = Metric("kvtrace_recorder_publications_total", Kind.COUNTER, "Snapshots published.")
PUBLISHING = Metric("kvtrace_recorder_publish_seconds", Kind.GAUGE, "How long the last publication took.")
ANALYSIS = Metric("kvtrace_recorder_analyze_seconds", Kind.GAUGE, "How long the last analysis took.")
NOTICES = Metric("kvtrace_recorder_notices_total", Kind.COUNTER, "Files skipped, failures and restarts.")
FAILING = Metric("kvtrace_recorder_failing", Kind.GAUGE, "1 while the recorder cannot write, else 0.")
SPANS = Metric("kvtrace_otlp_spans_total", Kind.COUNTER, "Spans handed to the OTLP exporter.", (FATE,))
BUILD = Metric("kvtrace_build_info", Kind.GAUGE, "Always 1; the labels say what runs.", (VERSION,))

METRICS: tuple[Metric, ...] = (
    REQUESTS,
    TTFT,
    TTFT_CLASS,
    CAUSES,
    TRANSFER_LOW,
    TRANSFER_HIGH,
    HIDDEN,
    PROMPT,
    OUTPUT,
    LATE,
    TPOT,
    TPOT_EXTENSION,
    TRANSFERS,
    MOVED_BYTES,
    DESCRIPTORS,
    RESERVED,
    HELD,
    FAULT_COUNT,
    HANDSHAKES,
    STEPS,
    STEP_TOKENS,
    CONNECTOR,
    RUNNING,
    WAITING,
    EVENTS,
    LOST,
    LAG,
    PROCESSES,
    PUBLISHED,
    PUBLISHING,
    ANALYSIS,
    NOTICES,
    FAILING,
    SPANS,
    BUILD,
)
METRIC_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
