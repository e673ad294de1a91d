"""Events for a store, and Python in a process of its own, where file locks count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

ROOT = Path(__file__).parent.parent


def events(*requests: str, first: int = 0) -> pa.Table:
    count = len(requests)
    return pa.table(
        {
            "process": pa.array([1] * count, pa.int32()),
            "stage": ["step.started"] * count,
            "t_ns": list(range(first, first + count)),
            "request": list(requests),
            "ref": [""] * count,
            **{slot: [0] * count for slot in "abcd"},
        }
    )


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, where DuckDB's file locks count."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
