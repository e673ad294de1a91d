"""Load with Poisson arrivals, and what the client saw of every request.

Arrivals are open loop: a request leaves when it is due, however many are in flight, unless `concurrency` says
otherwise. Times are monotonic nanoseconds, the clock that engines and router on the same machine stamp with.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from kvtrace.errors import UsageError
from kvtrace.lab import model
from kvtrace.lab.exchange import Record, fetch
from kvtrace.lab.progress import Progress

REQUESTS = 20
RATE_QPS = 2.0
INPUT_LEN = 600
OUTPUT_LEN = 16
SEED = 0
_TIMEOUT_S = 300.0
_NS_PER_MS = 1e6
_LOWEST_TOKEN = 3  # the tokens below are the model's special ones


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be sent."""

    requests: int = REQUESTS
    rate_qps: float = RATE_QPS
    """Mean arrivals per second; infinity sends all at once."""
    input_len: int = INPUT_LEN
    output_len: int = OUTPUT_LEN
    seed: int = SEED
    model: str = model.NAME
    concurrency: int | None = None
    """Most requests in flight; None for no bound."""
    client_id: str | None = None
    """One X-Request-Id for all requests; None gives each its own."""
    stream: bool = True

    def __post_init__(self) -> None:
        if self.requests < 1 or self.input_len < 1 or self.output_len < 1 or not self.rate_qps > 0:
            raise UsageError("requests, input and output length are at least 1, and the rate is above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError("concurrency is at least 1")


@dataclass(frozen=True, slots=True)
class Result:
    """All requests of one load."""

    load: Load
    records: tuple[Record, ...] = field(repr=False)

    @property
    def completed(self) -> list[Record]:
        """Return the requests that were answered whole."""
        return [record for record in self.records if not record.error]

    @property
    def duration_s(self) -> float:
        """Return the time from the first request's start to the last one's end, seconds."""
        return (max(r.end_ns for r in self.records) - min(r.start_ns for r in self.records)) / 1e9

    @property
    def offered_rate_qps(self) -> float:
        """Return the rate at which requests were due, requests per second; infinity for one burst."""
        span_ns = self.records[-1].due_ns - self.records[0].due_ns
        return (len(self.records) - 1) / (span_ns / 1e9) if span_ns else float("inf")

    @property
    def served_rate_qps(self) -> float:
        """Return the rate at which requests were answered, requests per second."""
        return len(self.completed) / self.duration_s

    def summary(self) -> dict[str, float | int | None]:
        """Return the figures that serving benchmarks print, times in milliseconds."""
        done = self.completed
        figures: dict[str, float | int | None] = {
            "successful_requests": len(done),
            "failed_requests": len(self.records) - len(done),
            "benchmark_duration_s": self.duration_s,
            "total_input_tokens": sum(record.prompt_tokens for record in done),
            "total_generated_tokens": sum(record.output_tokens for record in done),
            "offered_request_rate_qps": self.offered_rate_qps if self.offered_rate_qps < float("inf") else None,
            "request_throughput_qps": self.served_rate_qps,
            "output_token_throughput_tps": sum(record.output_tokens for record in done) / self.duration_s,
        }
        for name, values in (
            ("ttft", [r.ttft_ns for r in done if r.ttft_ns is not None]),
            ("tpot", [r.tpot_ns for r in done if r.tpot_ns is not None]),
            ("itl", [gap for r in done for gap in r.itl_ns]),
        ):
            figures |= _spread(name, [value / _NS_PER_MS for value in values])
        return figures

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "load": asdict(self.load),
            "summary": self.summary(),
            "requests": [asdict(record) for record in self.records],
        }

    def to_text(self) -> str:
        """Return the summary under the names that serving benchmarks print, and what their throughput counts."""
        figures = self.summary()
        lines = [f"{label + ':':<40}{_number(figures[name])}" for name, label in _LABELS.items()]
        lines.append("Throughput is over the benchmark duration: from the first request's start to the last one's end.")
        if figures["failed_requests"]:
            lines.append("first error: " + next(record.error for record in self.records if record.error))
        return "\n".join(lines)


_LABELS = {
    "successful_requests": "Successful requests",
    "failed_requests": "Failed requests",
    "benchmark_duration_s": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_generated_tokens": "Total generated tokens",
    "offered_request_rate_qps": "Offered request rate (req/s)",
    "request_throughput_qps": "Request throughput (req/s)",
    "output_token_throughput_tps": "Output token throughput (tok/s)",
} | {
    f"{statistic.lower()}_{name.lower()}_ms": f"{statistic} {name} (ms)"
    for name in ("TTFT", "TPOT", "ITL")
    for statistic in ("Mean", "Median", "P99")
}


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def _spread(name: str, values: list[float]) -> dict[str, float | int | None]:
    """Return mean, median and 99th percentile of milliseconds, None where there are no values."""
    if not values:
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", "median", "p99")}
    ordered = sorted(values)
    rank = 0.99 * (len(ordered) - 1)
    low, high = ordered[int(rank)], ordered[min(int(rank) + 1, len(ordered) - 1)]
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"p99_{name}_ms": low + (high - low) * (rank % 1),
    }


def prompt(seed: int, index: int, length: int) -> list[int]:
    """Return the token ids of one request's prompt, the same for the same arguments."""
    source = random.Random(f"{seed}/{index}")  # noqa: S311 -- a workload, not a secret
    return [source.randrange(_LOWEST_TOKEN, model.VOCABULARY) for _ in range(length)]


def arrivals_s(load: Load) -> list[float]:
    """Return when each request is due, seconds after the first: a Poisson process, the same for the same seed."""
    source = random.Random(load.seed)  # noqa: S311 -- a workload, not a secret
    due_s = [0.0]
    while len(due_s) < load.requests:
        due_s.append(due_s[-1] + (0.0 if load.rate_qps == float("inf") else source.expovariate(load.rate_qps)))
    return due_s


def run(url: str, *, quiet: bool = False, **settings: Any) -> Result:
    """Send a load, given as the fields of `Load`, to the server at `url` and return what the client saw."""
    load = Load(**settings)
    with Progress(quiet=quiet) as progress:
        return Result(load, tuple(asyncio.run(_drive(url, load, progress))))


async def _drive(url: str, load: Load, progress: Progress) -> list[Record]:
    """Send every request when it is due; return the records in the order of arrival."""
    gate = asyncio.Semaphore(load.concurrency or load.requests)
    run_id = secrets.token_hex(4)
    bodies = [_body(load, index) for index in range(load.requests)]
    done = 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_TIMEOUT_S, trust_env=False) as client:
        begin_ns = time.monotonic_ns()

        async def one(index: int, due_s: float) -> Record:
            nonlocal done
            due_ns = begin_ns + round(due_s * 1e9)
            await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
            async with gate:
                identity = load.client_id or f"load-{run_id}-{index:05d}"
                record = await fetch(client, bodies[index], Record(index, identity, due_ns, time.monotonic_ns()))
            done += 1
            if done == load.requests or done % max(1, load.requests // 10) == 0:
                progress.show("load", f"{done} of {load.requests} requests answered")
            return record

        return await asyncio.gather(*(one(index, due_s) for index, due_s in enumerate(arrivals_s(load))))


def _body(load: Load, index: int) -> dict[str, Any]:
    """Return one request's body: a prompt of exact length, a greedy answer of exact length."""
    body: dict[str, Any] = {
        "model": load.model,
        "prompt": prompt(load.seed, index, load.input_len),
        "max_tokens": load.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": load.stream,
    }
    return body | ({"stream_options": {"include_usage": True}} if load.stream else {})
