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
from kvtrace.lab.stack import Lab
from tests.otlp_receiver import RECEIVERS, Received
from tests.test_collect import until

pytestmark = pytest.mark.engine

TRACE_ID, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROTOCOLS = {"grpc": "grpc", "http": "http/protobuf"}


def own(received: Received) -> dict[str, list[Any]]:
    """Return the spans of the client's trace by name."""
    found: dict[str, list[Any]] = {}
    for span in received.spans():
        if span.trace_id.hex() == TRACE_ID:
            found.setdefault(span.name, []).append(span)
    return found


@pytest.mark.parametrize(("mode", "transport"), [("push", "grpc"), ("pull", "http")])
def test_a_request_is_one_connected_trace_with_vllms_own_spans(tmp_path: Path, mode: str, transport: str) -> None:
    """The router's span hangs below the client's, vLLM's two below the router's, and nothing hangs in the air."""
    spool = tmp_path / "spool"
    spool.mkdir()
    with RECEIVERS[transport]() as received:
        endpoint = received.endpoint.replace("grpc://", "http://")
        endpoint += "/v1/traces" if transport == "http" else ""
        variables = {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": PROTOCOLS[transport],
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        lab = Lab(
            mode, spool=spool, quiet=True, arguments=("--otlp-traces-endpoint", endpoint),
            environment={"prefill": variables, "decode": variables, "router": {"KVTRACE_SPANS": "1"}},
        )  # fmt: skip
        sending = SpanObserver(Sender(received.endpoint, {}))
        with lab, Recorder(tmp_path / "run.duckdb", [spool], {}, observers=[sending]) as recorder:
            recorder.start()
            body = {"model": lab.model, "prompt": workload.prompt(5, 0, 200), "max_tokens": 4, "stream": True}
            headers = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
            answer = httpx.post(f"{lab.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            until(lambda: len(own(received).get("llm_request", [])) == 2 and "kvtrace.request" in own(received), 30)

    spans = own(received)
    (root,) = spans["kvtrace.request"]
    ids = {span.span_id for some in spans.values() for span in some}
    assert root.parent_span_id.hex() == CLIENT_SPAN
    assert [span.parent_span_id for span in spans["llm_request"]] == [root.span_id] * 2
    assert {"kvtrace.prefill", "kvtrace.decode", "kvtrace.handoff", "kvtrace.transfer"} <= spans.keys()
    assert all(span.parent_span_id in ids for some in spans.values() for span in some if span is not root)
    for span in spans["llm_request"]:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= root.end_time_unix_nano
