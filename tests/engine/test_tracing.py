"""A client's trace through real engines whose own tracing is on: kvtrace's spans and vLLM's make up one tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtrace.collect import Recorder
from kvtrace.exporters.live import SpanObserver
from kvtrace.exporters.otlp import Sender
from kvtrace.lab import workload
from tests.engine.deployment import Deployment
from tests.otlp_receiver import Received
from tests.waiting import until

pytestmark = pytest.mark.engine

TRACE_ID, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def own(received: Received) -> dict[str, list[Any]]:
    """Return the spans of the client's trace by name."""
    found: dict[str, list[Any]] = {}
    for span in received.spans():
        if span.trace_id.hex() == TRACE_ID:
            found.setdefault(span.name, []).append(span)
    return found


def test_pull_over_http_is_one_connected_trace_with_vllms_own_spans(
    two_ranks: Deployment, http_spans: Received, tmp_path: Path
) -> None:
    check_is_one_trace(two_ranks, http_spans, tmp_path)


def test_push_over_grpc_is_one_connected_trace_with_vllms_own_spans(
    few_blocks: Deployment, grpc_spans: Received, tmp_path: Path
) -> None:
    check_is_one_trace(few_blocks, grpc_spans, tmp_path)


def check_is_one_trace(deployment: Deployment, received: Received, folder: Path) -> None:
    """Check that the router's span hangs below the client's, vLLM's two below the router's, and none in the air."""
    lab, sending = deployment.lab, SpanObserver(Sender(received.endpoint, {}))
    with Recorder(
        folder / "run.duckdb", [deployment.spool], {}, delete_consumed=False, observers=[sending]
    ) as recorder:
        recorder.start()
        body = {"model": lab.model, "prompt": workload.prompt(5, 0, 200), "max_tokens": 4, "stream": True}
        headers = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
        answer = httpx.post(f"{lab.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        until(lambda: len(own(received).get("llm_request", [])) == 2 and "kvtrace.request" in own(received))

    spans = own(received)
    (root,) = spans["kvtrace.request"]
    ids = {span.span_id for some in spans.values() for span in some}
    assert root.parent_span_id.hex() == CLIENT_SPAN
    assert [span.parent_span_id for span in spans["llm_request"]] == [root.span_id] * 2
    assert {"kvtrace.prefill", "kvtrace.decode", "kvtrace.handoff", "kvtrace.transfer"} <= spans.keys()
    assert all(span.parent_span_id in ids for some in spans.values() for span in some if span is not root)
    for span in spans["llm_request"]:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= root.end_time_unix_nano
