"""Engine processes load only the emit side: import contracts cannot see a deferred import, sys.modules can."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "duckdb",
    "rich",
    "pyarrow",
    "numpy",
    "opentelemetry",
    "perfetto",
    "prometheus_client",
    "pyroscope",
    "typer",
    "httpx",
    "starlette",
    "uvicorn",
    "vllm",
    "torch",
}


@pytest.mark.parametrize(
    "module", ["kvtrace.emit", "kvtrace.profiler", "instrumented_connectors", "instrumented_connectors.plugin"]
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) & HEAVY == set()
