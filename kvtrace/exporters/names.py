"""The attribute names of exported spans: OpenTelemetry's own where they exist, `kvtrace.` else.

The GenAI conventions are under development and were moved once already, so their names are constants of ours.
"""

from __future__ import annotations

SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"
SERVICE_VERSION = "service.version"
SERVICE_NAMESPACE = "service.namespace"

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
HTTP_STATUS = "http.response.status_code"
URL = "url.full"

SHARES = (
    "ttft_ns",
    "compute_ns",
    "compute_run_ns",
    "compute_queue_ns",
    "coordination_ns",
    "transfer_ns",
    "transfer_low_ns",
    "transfer_high_ns",
    "unattributed_ns",
)
"""Columns of table request that stand on the request's span and slice as `kvtrace.` and their name."""

FACTS = (
    "request_id",
    "client_request_id",
    "attempt",
    "mode",
    "verdict",
    "scope",
    "join_method",
    "prefill_engine",
    "decode_engine",
    "moved_bytes",
    "descriptors",
    "transfers",
    "registration_late_ns",
    "crosses_hosts",
    "note",
)
"""The same for what is no share."""


def own(name: str) -> str:
    """Return a name of kvtrace's own as an attribute."""
    return f"kvtrace.{name}"
