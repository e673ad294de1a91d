"""Every Prometheus metric of kvtrace: name, type, unit, labels, a sentence. The exporter and the dashboards read it.

Units are Prometheus's own (seconds, bytes), counters end in `_total`. Labels are bounded: engines by `ENGINES_MOST`,
all others by the vocabulary. Request ids are never a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "kvtrace_"
ENGINES_MOST = 32
"""Engines that get label values of their own; further ones share the value `OTHER`."""
OTHER = "other"


class Kind(StrEnum):
    """Prometheus's type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its full name, type, unit ("" for counts), labels beside `COMMON`, a sentence, buckets' bounds."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    doc: str
    buckets: tuple[float, ...] = ()


COMMON = ("run", "model", "connector")
"""Labels of every series: the store's name, the model served, the class of the connector."""

LABELS: Mapping[str, str] = {
    "run": "Name of the store that is being recorded.",
    "model": "Model served, as the engines name it.",
    "connector": "Class of the KV connector.",
    "mode": "How the KV was handed over: push, pull, local or unknown.",
    "scope": "Where the first token was seen: client, router or engine; scopes do not compare.",
    "verdict": "How the hand-off ended.",
    "prefill": "Engine id of P, '' if there was none.",
    "decode": "Engine id of D, '' if there was none.",
    "class": "compute.run, compute.queue, coordination, transfer or unattributed.",
    "cause": "What passed the time, as the vocabulary names it.",
    "engine": "Engine id.",
    "outcome": "What became of it: done or failed; of a registration, in_time or late; of a span, exported or dropped.",
    "kind": "Kind of process: router, api, core or worker.",
    "state": "recording, or what else the recorder says of itself.",
}

OUTCOMES = ("done", "failed")
"""What becomes of a transfer and of a handshake."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
_COUNTS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
_PAIR = ("prefill", "decode")


def _metric(
    name: str, kind: Kind, unit: str, labels: tuple[str, ...], doc: str, buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(PREFIX + name, kind, unit, labels, doc, buckets)


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

RUN_INFO = _metric("run_info", G, "", (), "Always 1; its labels say what is being recorded.")

REQUESTS = _metric("requests_total", C, "", ("mode", "verdict", *_PAIR), "Requests that ended.")
ARRIVALS = _metric("arrivals_total", C, "", ("mode", *_PAIR), "Requests that came.")
IN_FLIGHT = _metric("in_flight_requests", G, "", (), "Requests that came and have not ended.")
TTFT = _metric("ttft_seconds", H, "seconds", ("mode", "scope", *_PAIR), "Time to first token.", _SECONDS)
CLASS = _metric(
    "ttft_class_seconds",
    H,
    "seconds",
    ("class", "mode", "scope", *_PAIR),
    "A class's part of the time to first token.",
    _SECONDS,
)
CAUSE = _metric(
    "ttft_cause_seconds_total", C, "seconds", ("cause", "class", "mode", "scope"), "Time to first token by cause."
)
TPOT = _metric("tpot_seconds", H, "seconds", ("mode", "decode"), "Time per token after the first.", _SECONDS)
EXTENSION = _metric(
    "step_extension_seconds_total",
    C,
    "seconds",
    ("decode",),
    "By how much connector work on the forward thread made D's steps longer, summed over the requests in them.",
)

REGISTRATIONS = _metric(
    "registrations_total", C, "", ("outcome", *_PAIR), "D's registrations at P: there when P had computed, or late."
)
LATENESS = _metric(
    "registration_late_seconds", H, "seconds", _PAIR, "How long after P had computed late registrations came.", _SECONDS
)
TRANSFERS = _metric("transfers_total", C, "", ("engine", "outcome"), "Transfers, by the engine that drives them.")
MOVED = _metric("transfer_bytes_total", C, "bytes", ("engine",), "Bytes moved by transfers that were seen done.")
DESCRIPTORS = _metric("transfer_descriptors", H, "", ("engine",), "Descriptors of a transfer.", _COUNTS)
POSTING = _metric(
    "transfer_post_seconds", H, "seconds", ("engine",), "Time that the posting call took.", _SHORT_SECONDS
)
SEEN = _metric(
    "transfer_seen_seconds",
    H,
    "seconds",
    ("engine",),
    "From the start of the post to the first sign of completion.",
    _SECONDS,
)
HANDSHAKES = _metric("handshakes_total", C, "", ("engine", "outcome"), "Handshakes, by the engine that began them.")

LEASES = _metric("leases_total", C, "", ("engine",), "Leases of blocks on P that began, one a rank.")
EXPIRED = _metric("leases_expired_total", C, "", ("engine",), "Leases of blocks on P that ran out unread, one a rank.")
HELD = _metric("held_blocks", G, "", ("engine",), "Blocks that P keeps for hand-offs after it has finished.")
RESERVED = _metric("reserved_blocks", G, "", ("engine",), "Blocks on D reserved for KV that has not come.")
WAITING = _metric(
    "waiting_requests", G, "", ("engine",), "Requests in the engine's scheduler that no step worked on yet."
)
WAITING_FOR_KV = _metric("waiting_for_kv_requests", G, "", ("engine",), "Those of them whose blocks wait for KV.")
RUNNING = _metric("running_requests", G, "", ("engine",), "Requests in the engine's latest step.")

STEPS = _metric("steps_total", C, "", ("engine",), "Steps with tokens in them.")
STEP_TIME = _metric("step_seconds_total", C, "seconds", ("engine",), "Time in such steps, from made up to taken in.")
CONNECTOR_TIME = _metric(
    "connector_seconds_total",
    C,
    "seconds",
    ("engine",),
    "The part of it that the connector took on the forward thread.",
)

EVENTS = _metric("events_total", C, "", (), "Events that are in the store.")
LOST = _metric("lost_records_total", C, "", ("kind",), "Records that processes could not keep.")
SILENCED = _metric("silenced_processes", G, "", ("kind",), "Processes in which tracing switched itself off.")
LAG = _metric("recorder_lag_seconds", G, "seconds", (), "How old the newest event was when it was committed.")
PUBLISHED = _metric(
    "recorder_published_timestamp_seconds", G, "seconds", (), "When a snapshot was last published, unix."
)
PUBLISHING = _metric(
    "recorder_publishing_seconds_total", C, "seconds", (), "Processor time that publishing took, copies included."
)
SKIPPED = _metric(
    "recorder_skipped_files", G, "", (), "Spool files that the recorder cannot read, or knows under another name."
)
SPOOL = _metric("spool_bytes", G, "bytes", (), "Size of the spool files that are left.")
STATE = _metric("recorder_state", G, "", ("state",), "1 for the recorder's state, 0 for all others.")

SPANS = _metric("otlp_spans_total", C, "", ("outcome",), "Spans that an OTLP receiver took, or that were dropped.")

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def series_of(metric: Metric) -> tuple[str, ...]:
    """Return the names under which the metric's samples can be asked for."""
    if metric.kind is Kind.HISTOGRAM:
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
    return (metric.name,)
