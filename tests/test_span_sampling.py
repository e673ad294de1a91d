"""Where spans go and which requests' spans do: the endpoint's protocol, and what sampling keeps."""

from __future__ import annotations

from typing import Any

import pytest

from kvtrace.errors import UsageError
from kvtrace.exporters.live import Sampling
from kvtrace.exporters.receiver import split_endpoint

MS = 1_000_000


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("grpc://h:1", ("grpc", "h:1", True)),
        ("grpcs://h", ("grpc", "h:4317", False)),
        ("http://h:4317", ("grpc", "h:4317", True)),
        ("https://h:4317/", ("grpc", "h:4317", False)),
        ("http://h:4318", ("http", "http://h:4318/v1/traces", True)),
        ("https://h/otlp/v1/traces", ("http", "https://h/otlp/v1/traces", False)),
        ("grpc://[::1]:5", ("grpc", "[::1]:5", True)),
    ],
)
def test_an_endpoint_says_its_protocol(endpoint: str, parts: tuple[str, str, bool]) -> None:
    assert split_endpoint(endpoint) == parts


@pytest.mark.parametrize("endpoint", ["", "h:4317", "ftp://h", "http://", "http://h:x"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="OTLP endpoint"):
        split_endpoint(endpoint)


def row(name: str, ttft_ms: int | None = 100, verdict: str = "complete") -> dict[str, Any]:
    return {"request_id": name, "ttft_ns": None if ttft_ms is None else ttft_ms * MS, "verdict": verdict}


def test_sampling_keeps_a_share_and_whatever_is_slow_or_failed() -> None:
    sampling = Sampling(0.1)
    ordinary = sum(sampling.keeps(row(f"kvt-{number}", 100 + number % 7)) for number in range(2000))

    assert 150 < ordinary < 1000  # a tenth, and those that happen to be the slowest of late
    assert sampling.keeps(row("kvt-slow", 500))
    assert sampling.keeps(row("kvt-none", None))
    for verdict in ("failed", "aborted", "expired", "recomputed", "incomplete"):
        assert sampling.keeps(row("kvt-x", 100, verdict))
    nothing = Sampling(0.0)
    assert not any(nothing.keeps(row(f"kvt-{number}")) for number in range(500))
    assert nothing.keeps(row("kvt-slow", 101))


def test_sampling_of_everything_keeps_everything() -> None:
    sampling = Sampling()

    assert all(sampling.keeps(row(f"kvt-{number}", number)) for number in range(200, 0, -1))
