"""Records of the tools whose files can be imported, with small round times and the fields that the tools write."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvtrace import cli
from kvtrace.store import Store
from tests.moulds import cast
from tests.test_analyze import fill
from tests.trace import MS, START_NS, Trace, ns

BOOTED_NS = START_NS - 1_000_000_000_000
PROMPT = "the prompt that nobody may store"


def aiperf(client_id: str | None, sent_ms: float, ttft_ms: float | None, done_ms: float, **changed: Any) -> str:
    """Return a line of AIPerf's profile_export.jsonl; `changed` replaces top-level fields, metadata aside."""
    metadata = {
        "session_num": 0, "x_request_id": client_id, "x_correlation_id": "c", "conversation_id": PROMPT,
        "credit_issued_ns": ns(sent_ms), "request_start_ns": ns(sent_ms), "request_ack_ns": ns(sent_ms + 1),
        "request_end_ns": ns(done_ms), "worker_id": "w", "record_processor_id": "p",
        "benchmark_phase": "profiling", "was_cancelled": False,
    }  # fmt: skip
    metrics: dict[str, Any] = {
        "input_sequence_length": {"value": 600, "unit": "tokens"},
        "output_sequence_length": {"value": 16, "unit": "tokens"},
        "inter_chunk_latency": {"value": [1.0, 2.0], "unit": "ms"},
        "request_latency": {"value": done_ms - sent_ms, "unit": "ms"},
    }
    if ttft_ms is not None:
        metrics["time_to_first_token"] = {"value": ttft_ms, "unit": "ms"}
    metadata |= changed.pop("metadata", {})
    metrics |= changed.pop("metrics", {})
    return json.dumps({"metadata": metadata, "metrics": metrics, "error": None, **changed})


def bench(*requests: tuple[float, float, float], **changed: Any) -> dict[str, Any]:
    """Return a result of `vllm bench serve --save-detailed`: (start, TTFT, whole time) of each request, in seconds."""
    return {
        "date": "20010909-014650", "backend": "vllm", "label": None, "model_id": "tiny", "tokenizer_id": "tiny",
        "num_prompts": len(requests), "request_rate": "inf", "duration": 1.0, "completed": len(requests),
        "mean_ttft_ms": float("nan"), "input_lens": [600] * len(requests), "output_lens": [16] * len(requests),
        "ttfts": [ttft for _, ttft, _ in requests], "itls": [[whole - ttft] for _, ttft, whole in requests],
        "start_times": [start for start, _, _ in requests], "generated_texts": [PROMPT] * len(requests),
        "errors": [""] * len(requests), **changed,
    }  # fmt: skip


def dynamo(request_id: str, received_ms: int, *, wrapped: bool = False, **changed: Any) -> str:
    """Return a line of Dynamo's request trace: P is asked 10 ms after arrival, done at 110, first token at 150."""
    request = {
        "request_id": request_id, "x_request_id": f"client-{request_id}", "model": "tiny", "input_tokens": 600,
        "output_tokens": 16, "cached_tokens": 0, "request_received_ms": START_NS // MS + received_ms,
        "prefill_wait_time_ms": 10.0, "prefill_time_ms": 100.0, "ttft_ms": 110.0, "total_time_ms": 400.0,
        "avg_itl_ms": 3.0, "kv_hit_rate": 0.5, "kv_transfer_estimated_latency_ms": 40.0, "queue_depth": 0,
        "worker": {"prefill_worker_id": 1, "prefill_dp_rank": 0, "decode_worker_id": 2, "decode_dp_rank": 0},
        "replay": {"trace_block_size": 32, "input_length": 600, "input_sequence_hashes": [1, 2]},
        "finish_reason_metadata": {"finish_reason": "length"},
    } | changed  # fmt: skip
    event = {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1,
        "event_source": "dynamo", "request": {key: value for key, value in request.items() if value is not None},
    }  # fmt: skip
    return json.dumps({"timestamp": 1, "event": event} if wrapped else event)


def hashed(text: str) -> str:
    """Return the hash that vLLM's lifecycle lines have for an id; written anew here, so that the two must agree."""
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"vllm-kv-trace").hexdigest()


def lifecycle(event: str, role: str, t_ms: float, own: str, other: str | None = None, **changed: Any) -> str:
    """Return one lifecycle record as vLLM writes it, without the log line around it."""
    record: dict[str, Any] = {
        "schema": "vllm-kv-connector-v1", "event": event, "wall_ns": ns(t_ms), "monotonic_ns": ns(t_ms) - BOOTED_NS,
        "connector": "NixlPushConnector", "transfer_mode": "push", "component": "worker", "role": role,
        "request_id_hash": hashed(own), "request_group_id_hash": hashed(own[:-9]),
    }  # fmt: skip
    if other is not None:
        record["remote_request_id_hash"] = hashed(other)
    return json.dumps({**record, **changed}, separators=(",", ":"))


def logged(record: str, number: int = 1) -> str:
    """Return a record as a line of vLLM's log."""
    return f"(Worker pid={number}) INFO 09-09 01:46:40 [lifecycle.py:1] KV_CONNECTOR_LIFECYCLE {record}"


def handoff(name: str, *, registered_ms: float = 20, start_ms: float = 0) -> list[str]:
    """Return the log lines of a push hand-off: P done at 40, matched 50 or after the registration, D reports at 70."""
    p, d = f"cmpl-{name}-0-aaaaaaaa", f"cmpl-{name}-0-bbbbbbbb"
    late = max(0.0, registered_ms + 1 - 50)
    steps = [
        ("registration_staged", "consumer", 10, d, p, {"block_count": 38}),
        ("registration_queued", "consumer", 12, d, None, {}),
        ("registration_sent", "consumer", registered_ms, d, p, {}),
        ("registration_received", "producer", registered_ms + 1, d, None, {}),
        ("transfer_staged", "producer", 40, p, None, {"block_count": 38, "component": "scheduler"}),
        ("blocks_matched", "producer", 50 + late, p, d, {}),
        ("transfer_started", "producer", 51 + late, p, d, {}),
        ("transfer_completed", "consumer", 70 + late, d, p, {"block_count": 38}),
        ("transfer_completed", "producer", 75 + late, p, None, {}),
    ]
    return [
        logged(lifecycle(event, role, start_ms + t_ms, own, other, **more))
        for event, role, t_ms, own, other, more in steps
    ]


def write(path: Path, *lines: str) -> Path:
    """Write lines to a file and return its path."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def recorded(path: Path, *traces: Trace) -> Path:
    """Make an analysed store of traces at `path`, as a recorder leaves one, and return the path."""
    from kvtrace.analyze import analyze

    def make(made: Path) -> None:
        with Store.open(made, "write") as store:
            for trace in traces:
                fill(store, trace)
            analyze(store)

    return cast(path, ("recorded", *(tuple(trace.events) for trace in traces)), make)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run `kvtrace import` and return its exit code and what it said; nothing may go to stdout."""
    code = cli.main(["import", *map(str, arguments)])
    streams = capsys.readouterr()
    assert streams.out == ""
    return code, streams.err


def rows(path: Path, sql: str, **bound: object) -> list[dict[str, Any]]:
    """Return what a query of a store returns."""
    with Store.open(path) as store:
        return store.rows(sql, bound)


def requests(path: Path) -> dict[str, dict[str, Any]]:
    """Return the requests of a store by id, each checked: its shares and its segments add up to its TTFT."""
    with Store.open(path) as store:
        sums = store.rows("SELECT request_key, sum(end_ns - start_ns)::BIGINT AS ns FROM segment GROUP BY ALL")
        found = {row["request_id"]: row for row in store.rows("SELECT * FROM request")}
    spans = {row["request_key"]: row["ns"] for row in sums}
    for row in found.values():
        if row["ttft_ns"] is not None:
            parts = ("compute_ns", "coordination_ns", "transfer_ns", "unattributed_ns")
            assert sum(row[part] for part in parts) == row["ttft_ns"] == spans.get(row["request_key"], 0)
            assert row["transfer_low_ns"] <= row["transfer_ns"] <= row["transfer_high_ns"] <= row["ttft_ns"]
    return found


def causes_ms(path: Path, request_id: str) -> dict[str, float]:
    """Return cause -> ms on the critical path of one request."""
    sql = "SELECT cause, sum(duration_ns)::BIGINT AS ns FROM critical_path WHERE request_id = $id GROUP BY ALL"
    return {row["cause"]: row["ns"] / MS for row in rows(path, sql, id=request_id)}
