"""Load: seeded arrivals, exact prompts, and client-side times that can be trusted."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtrace.errors import UsageError
from kvtrace.lab import model, workload
from kvtrace.lab.exchange import Record


class Server:
    """A completions server that streams one token, waits, streams the next, and keeps what it was asked.

    It answers nobody before `together` requests have been there at the same time.
    """

    def __init__(self, token_gap_s: float = 0.0, first_gap_s: float = 0.0, together: int = 1) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.sent_ns: list[int] = []
        """When each token was sent."""
        self.running = self.running_most = 0
        self._together = together
        self._are_together = asyncio.Event()
        self.reply: Callable[[dict[str, Any]], Response] | None = None
        self._gaps_s = (first_gap_s, token_gap_s)

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.ids.append(request.headers["x-request-id"])
        return self.reply(body) if self.reply else StreamingResponse(self._events(body))

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        self.running_most = max(self.running, self.running_most)
        if self.running >= self._together:
            self._are_together.set()
        first_gap_s, token_gap_s = self._gaps_s
        yield _event(choices=[{"text": "", "token_ids": None}])  # no content yet
        with suppress(TimeoutError):
            await asyncio.wait_for(self._are_together.wait(), 60)
        for number in range(body["max_tokens"]):
            await asyncio.sleep(token_gap_s if number else first_gap_s)
            self.sent_ns.append(time.monotonic_ns())
            yield _event(choices=[{"text": "x", "token_ids": [number + 3]}])
        self.running -= 1
        yield _event(choices=[], usage={"completion_tokens": body["max_tokens"], "prompt_tokens": len(body["prompt"])})
        yield "data: [DONE]\n\n"


def _event(**content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Serve on a free port; the address."""
    app = Starlette(routes=[Route("/v1/completions", server.answer, methods=["POST"])])
    runner = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        while not runner.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join()


def _run(url: str, **settings: Any) -> workload.Result:
    return workload.run(url, quiet=True, **{"requests": 1, "rate_qps": float("inf")} | settings)


def test_first_token_is_the_first_content_and_gaps_are_between_contents() -> None:
    server = Server(token_gap_s=0.05, first_gap_s=0.1)
    with serving(server) as url:
        (record,) = _run(url, output_len=3).records

    assert record.status == 200
    assert record.error == ""
    assert record.ttft_ns is not None
    arrived_ns = list(itertools.accumulate((record.start_ns + record.ttft_ns, *record.itl_ns)))
    assert all(sent < arrived for sent, arrived in zip(server.sent_ns, arrived_ns, strict=True))
    assert arrived_ns[-1] <= record.end_ns
    assert (record.text, record.token_ids, record.output_tokens) == ("xxx", (3, 4, 5), 3)


def test_prompts_have_the_exact_length_and_depend_on_seed_and_index_only() -> None:
    server = Server()
    with serving(server) as url:
        _run(url, requests=3, input_len=40, output_len=1, seed=7, rate_qps=500)

    arrived = sorted(body["prompt"] for body in server.bodies)
    assert arrived == sorted(workload.prompt(7, index, 40) for index in range(3))
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 3
    assert all(3 <= token < model.VOCABULARY for body in server.bodies for token in body["prompt"])
    assert workload.prompt(8, 0, 40) != workload.prompt(7, 0, 40)


def test_arrivals_are_poisson_and_seeded() -> None:
    load = workload.Load(requests=4001, rate_qps=8.0, seed=3)
    due_s = workload.arrivals_s(load)

    gaps_s = [later - earlier for earlier, later in itertools.pairwise(due_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    spread_s = (sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) ** 0.5
    assert due_s == workload.arrivals_s(load)
    assert mean_s == pytest.approx(1 / 8, rel=0.05)
    assert spread_s == pytest.approx(1 / 8, rel=0.05)  # an exponential's deviation is its mean


def test_the_loop_is_open_a_slow_server_does_not_hold_requests_back() -> None:
    server = Server(together=5)
    with serving(server) as url:
        result = _run(url, requests=5, output_len=1)

    assert server.running_most == 5
    assert result.offered_rate_qps == float("inf")
    assert result.served_rate_qps == pytest.approx(5 / result.duration_s)


def test_concurrency_bounds_what_is_in_flight() -> None:
    server = Server(first_gap_s=0.02, together=2)
    with serving(server) as url:
        result = _run(url, requests=6, output_len=1, concurrency=2)

    assert server.running_most == 2
    assert len(result.completed) == 6


def test_ids_are_unique_unless_one_is_given() -> None:
    server = Server()
    with serving(server) as url:
        result = _run(url, requests=3, output_len=1)
        assert sorted(server.ids) == sorted(record.client_request_id for record in result.records)
        assert len(set(server.ids)) == 3

        server.ids.clear()
        _run(url, requests=3, output_len=1, client_id="same")
        assert server.ids == ["same"] * 3


@pytest.mark.parametrize(
    ("reply", "error", "status"),
    [
        (lambda _: JSONResponse({"error": "too long"}, 400), "HTTP 400.*too long", 400),
        (lambda _: StreamingResponse(iter(["data: {}\n\n"])), "without its end mark", 200),
        (lambda _: StreamingResponse(iter([_event(error={"message": "engine died"})])), "engine died", 200),
        (lambda _: StreamingResponse(iter(["data: {broken\n\n"])), "JSONDecodeError", 200),
    ],
)
def test_what_goes_wrong_is_the_requests_error_and_no_exception(reply: Any, error: str, status: int) -> None:
    server = Server()
    server.reply = reply
    with serving(server) as url:
        result = _run(url)

    (record,) = result.records
    assert record.status == status
    assert re.search(error, record.error)
    assert result.summary()["failed_requests"] == 1
    assert "first error" in result.to_text()


def test_nobody_there_is_an_error_of_every_request() -> None:
    result = _run("http://127.0.0.1:9", requests=2)

    assert [record.status for record in result.records] == [0, 0]
    assert all("ConnectError" in record.error for record in result.records)


def test_a_reply_that_is_not_streamed_has_no_first_token() -> None:
    server = Server()
    server.reply = lambda _: JSONResponse(
        {"choices": [{"text": "ab", "token_ids": [4, 5]}], "usage": {"completion_tokens": 2, "prompt_tokens": 600}}
    )
    with serving(server) as url:
        (record,) = _run(url, stream=False).records

    assert (record.ttft_ns, record.itl_ns) == (None, ())
    assert (record.text, record.token_ids, record.output_tokens, record.prompt_tokens) == ("ab", (4, 5), 2, 600)


def test_the_summary_has_the_fields_terms() -> None:
    def record(index: int, ttft_ms: int, end_ms: int) -> Record:
        return Record(
            index, "", 0, 0, end_ms * 10**6, 200, ttft_ms * 10**6, (10**7, 3 * 10**7), 3, 100, "abc", (1, 2, 3)
        )

    result = workload.Result(workload.Load(requests=2), (record(0, 100, 140), record(1, 300, 340)))

    figures = result.summary()
    assert (figures["mean_ttft_ms"], figures["median_ttft_ms"], figures["p99_ttft_ms"]) == (200, 200, 298)
    assert figures["mean_tpot_ms"] == 20  # 40 ms for the two tokens after the first
    assert (figures["median_itl_ms"], figures["mean_itl_ms"]) == (20, 20)
    assert figures["request_throughput_qps"] == pytest.approx(2 / 0.34)
    assert "Median TTFT (ms):" in result.to_text()
    assert "Throughput is over the benchmark duration: from the first request's start" in result.to_text()
    assert json.loads(json.dumps(result.to_json()))["summary"]["successful_requests"] == 2


@pytest.mark.parametrize(
    "wrong",
    [{"requests": 0}, {"rate_qps": 0}, {"rate_qps": math.nan}, {"input_len": 0}, {"output_len": 0}, {"concurrency": 0}],
)
def test_impossible_loads_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        workload.Load(**wrong)
