"""A real Prometheus that scrapes what a test exposes, and what it answers."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dashboards import tools


@contextmanager
def prometheus(folder: Path, port: int, scrapes: int = 6) -> Iterator[str]:
    """Run a Prometheus that scrapes `port` every second and yield its address once it has looked so many times."""
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f'  - {{job_name: kvtrace, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}\n'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    command = [
        tools.prometheus(), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder)
    address = f"http://127.0.0.1:{own}"
    try:
        end_s = time.monotonic() + 40
        while time.monotonic() < end_s:
            try:
                if samples(address, f"count_over_time(kvtrace_run_info[1m]) >= {scrapes}"):
                    break
            except OSError:
                pass
            time.sleep(0.2)
        else:
            raise AssertionError("Prometheus did not scrape within 40 s")
        yield address
    finally:
        process.terminate()
        process.wait(20)


def samples(address: str, expression: str, **span: float) -> list[dict[str, Any]]:
    """Return the series that an expression has now, or over a span."""
    what = "query_range" if span else "query"
    query = urllib.parse.urlencode({"query": expression, **span})
    with urllib.request.urlopen(f"{address}/api/v1/{what}?{query}", timeout=20) as reply:  # noqa: S310 -- loopback
        return list(json.load(reply)["data"]["result"])


def label_values(address: str, selector: str) -> dict[str, list[str]]:
    """Return every value that each label of the selected series has had."""

    def get(path: str) -> list[str]:
        query = urllib.parse.urlencode({"match[]": selector})
        with urllib.request.urlopen(f"{address}/api/v1/{path}?{query}", timeout=20) as reply:  # noqa: S310 -- loopback
            return list(json.load(reply)["data"])

    return {label: get(f"label/{label}/values") for label in get("labels")}
