"""Who reads a store while it is recorded: programs that are started, listened to, and asked once more in the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from kvtrace.dashboards import files
from kvtrace.dashboards.sources import DUCKDB
from kvtrace.store import Store
from tests.dashboards.grafana import asked, interpolated, situation_of
from tests.engine import programs


@dataclass
class Reader:
    """A program that reads, and what it has told so far."""

    process: Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def has_seen(self, requests: int) -> bool:
        """Return whether the latest reading knew so many requests; fail where the program has ended."""
        assert self.process.poll() is None, self.errors()
        return bool(self.lines) and self.lines[-1]["arrived"] >= requests

    def errors(self) -> str:
        """Return what the ended program said on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def listen(self) -> None:
        """Take in what the program tells until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))


@contextmanager
def reading(python: str, how: str, path: Path, **given: Any) -> Iterator[Reader]:
    """Let a program of `tests.engine.readers` read while the block runs; then once more, to its end."""
    process = Popen(
        [python, "-m", "tests.engine.readers", how, str(path)],
        cwd=programs.ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True,
    )  # fmt: skip
    reader = Reader(process)
    listening = threading.Thread(target=reader.listen)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        listening.start()
        yield reader
        process.terminate()
        process.wait(timeout=60)
    finally:
        process.kill()
        listening.join()
        process.wait()


@dataclass
class Explaining:
    """`kvtrace explain` as a process, again and again; by turns for people and as JSON."""

    store: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    ids: frozenset[str] = frozenset()
    running: Future[None] = field(default_factory=Future)
    hurry: threading.Event = field(default_factory=threading.Event)

    def has_seen(self, ids: frozenset[str]) -> bool:
        """Return whether the latest reading knew all these requests, the next comes at once; raise what went wrong."""
        self.hurry.set()
        if self.running.done():
            self.running.result()
        return ids <= self.ids

    def once(self) -> None:
        """Explain once in both ways."""
        assert "TTFT" in programs.run(programs.kvtrace("explain", self.store), 120).stdout
        ended = programs.run(programs.kvtrace("explain", self.store, "--json"), 120)
        assert ended.stderr == ""
        document = json.loads(ended.stdout)
        requests = document["requests"]
        for request in requests:
            if request["ttft_ns"] is not None:
                programs.assert_exact(request)
        ends = [segment["end_ns"] for request in requests for segment in request["segments"]]
        self.ids = frozenset(
            request[name] or "" for request in requests for name in ("request_id", "client_request_id")
        )
        self.lines.append(
            {
                "published_ns": int(document["run"]["recorder.published_ns"]),
                "state": document["run"]["recorder.state"],
                "events": int(document["run"]["recorder.events"]),
                "requests": len(requests),
                "newest_ns": max(ends),
            }
        )


@contextmanager
def explaining(store: Path) -> Iterator[Explaining]:
    """Explain while the block runs, and once more behind it; raise what went wrong."""
    told, ends = Explaining(store), threading.Event()

    def repeat() -> None:
        while not ends.is_set():
            began_s = time.monotonic()
            told.once()
            told.hurry.wait(time.monotonic() - began_s)

    with ThreadPoolExecutor(1) as pool:
        told.running = pool.submit(repeat)
        try:
            yield told
        finally:
            ends.set()
            told.hurry.set()
        told.running.result(timeout=240)
    told.once()
    told.lines[-1]["ids"] = sorted(told.ids)


@dataclass
class Ages:
    """How old the newest event and the newest request in the snapshot were, look after look, s."""

    event_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)


@contextmanager
def looking(store: Path) -> Iterator[Ages]:
    """Look twice a second, while the block runs, how old the newest event and request in the snapshot are."""
    ages = Ages()
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(0.5):
            asked_ns = time.time_ns()
            with Store.open(store) as opened:
                newest = opened.select("SELECT max(last_ns), (SELECT max(start_ns) FROM request) FROM process")
            for newest_ns, ages_s in zip(newest.values[0], (ages.event_s, ages.request_s), strict=True):
                if newest_ns is not None:
                    ages_s.append((asked_ns - newest_ns) / 1e9)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(look)
        try:
            yield ages
        finally:
            ends.set()
        running.result()


def panels_sql(from_ns: int, to_ns: int, request: str) -> list[str]:
    """Return the SQL of every panel and variable on DuckDB as it leaves the plug-in, for that time and that request."""
    found = []
    for board in (board.to_json() for board in files.boards()):
        chosen = {"kvtrace-handoff": {"scope": "router"}, "kvtrace-request": {"request": request}}.get(board["uid"], {})
        situation = situation_of(board, from_ns // 1_000_000, to_ns // 1_000_000, **chosen)
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        variables = [variable for variable in board["templating"]["list"] if variable["type"] == "query"]
        found += [asked(one["targets"][0], situation) for one in panels if one["datasource"]["type"] == DUCKDB]
        found += [interpolated(one["query"], situation) for one in variables if one["datasource"]["type"] == DUCKDB]
    return found
