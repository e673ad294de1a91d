"""A recorder beside a bench's load, with everything that it can show live."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.otlp_receiver import over_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def following(spool: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let a recorder follow a spool with live metrics, spans to a receiver and snapshots with a copy for Grafana.

    Gives its process, which may be stopped and continued; ends the bench where it does not record to the end.
    """
    with over_grpc() as received:
        options = ("--metrics", "0", "--otlp", received.endpoint, "--grafana-copy", str(folder / "copy.duckdb"))
        command = [sys.executable, "-m", "kvtrace", "record", "-o", str(folder / "run.duckdb"), "--spool", str(spool)]
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as recorder:
            try:
                yield recorder
            finally:
                recorder.send_signal(signal.SIGCONT)
                recorder.send_signal(signal.SIGINT)
                code = recorder.wait(timeout=120)
        spans = len(received.spans())
    if code or not spans:
        raise SystemExit(f"the recorder ended with {code} and sent {spans} spans")
