"""A real Prometheus that scrapes what a test exposes, and what it answers."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvtrace.lab import ports
from tests.dashboards import tools
from tests.waiting import LONG_S, until


@contextmanager
def prometheus(folder: Path, port: int, scrapes: int = 6) -> Iterator[str]:
    """Run a Prometheus that scrapes `port` every second and yield its address once it has looked so many times."""
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f'  - {{job_name: kvtrace, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}\n'
    )
    own = ports.take()  # not of those that outgoing connections get meanwhile
    command = [
        tools.prometheus(), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder)
    address = f"http://127.0.0.1:{own}"

    def has_scraped() -> bool:
        assert process.poll() is None, "Prometheus has ended"
        with suppress(OSError):
            return bool(samples(address, f"count_over_time(kvtrace_run_info[1m]) >= {scrapes}"))
        return False

    try:
        until(has_scraped, what="Prometheus has scraped")
        yield address
    finally:
        process.terminate()
        process.wait(LONG_S)


def samples(address: str, expression: str, **span: float) -> list[dict[str, Any]]:
    """Return the series that an expression has now, or over a span."""
    what = "query_range" if span else "query"
    query = urllib.parse.urlencode({"query": expression, **span})
    with urllib.request.urlopen(f"{address}/api/v1/{what}?{query}", timeout=LONG_S) as reply:  # noqa: S310 -- loopback
        return list(json.load(reply)["data"]["result"])


def label_values(address: str, selector: str) -> dict[str, list[str]]:
    """Return every value that each label of the selected series has had."""

    def get(path: str) -> list[str]:
        query = urllib.parse.urlencode({"match[]": selector})
        with urllib.request.urlopen(f"{address}/api/v1/{path}?{query}", timeout=LONG_S) as reply:  # noqa: S310 -- loopback
            return list(json.load(reply)["data"])

    return {label: get(f"label/{label}/values") for label in get("labels")}
