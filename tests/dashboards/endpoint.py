"""The small local server behind the page: the page's files, the board to draw, answers to what its panels ask."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvtrace.errors import KvtraceError
from kvtrace.store import Store
from tests.dashboards.grafana import ALL, Situation, expanded, frame, interpolated, situation_of

Answer = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A board as somebody has it open: its JSON, the time range in unix ms, each variable's choice and its options."""

    board: Mapping[str, Any]
    from_ms: int
    to_ms: int
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what the page asks for first."""
        span = {"from": self.from_ms, "to": self.to_ms}
        return {"board": self.board, "range": span, "choices": self.choices}


def opened(board: Mapping[str, Any], store: Store, from_ms: int, to_ms: int, **chosen: str) -> Shown:
    """Return a board opened on a store, its query variables' options listed by the store as the plug-in does."""
    choices: dict[str, dict[str, Any]] = {}
    for variable in board["templating"]["list"]:
        name = variable["name"]
        options: list[str] = []
        if variable["type"] == "query":
            situation = situation_of(board, from_ms, to_ms, **{k: v["value"] for k, v in choices.items()})
            options = [str(row[0]) for row in store.select(interpolated(variable["query"], situation)).values]
        elif variable["type"] == "datasource":
            options = ["kvtrace"]
        default = ALL if variable.get("includeAll") else variable["current"].get("value") or (options or [""])[0]
        choices[name] = {"value": chosen.get(name, default), "options": options}
    return Shown(board, from_ms, to_ms, choices)


def answer_from(store: Store) -> Answer:
    """Return what answers the panels of DuckDB boards: macros expanded, one statement, rows as a frame."""
    lock = threading.Lock()

    def answer(query: Mapping[str, Any]) -> list[dict[str, Any]]:
        sql = expanded(query["text"], Situation(query["from"], query["to"]))
        with lock:
            rows = store.select(sql)
        return [frame(list(rows.columns), list(rows.types), rows.values)]

    return answer


@contextmanager
def served(page: Path, shown: Shown, answer: Answer) -> Iterator[str]:
    """Serve the page until the block ends and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            path = page / name
            if name == "board":
                self._send(200, "application/json", json.dumps(shown.to_json()).encode())
            elif path.suffix in KINDS and path.parent == page and path.is_file():
                self._send(200, KINDS[path.suffix], path.read_bytes())
            else:
                self._send(404, "text/plain", b"")

        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                reply: dict[str, Any] = {"frames": answer(query)}
            except (KvtraceError, OSError) as error:
                reply = {"error": str(error)}
            self._send(200, "application/json", json.dumps(reply).encode())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/page.html"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
