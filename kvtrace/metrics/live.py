"""A recording as Prometheus sees it: the observer that keeps the values, and the endpoint that shows them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, start_http_server

from kvtrace import stages
from kvtrace.collect.observing import KEEP_NS, TOLD_NS
from kvtrace.errors import ExportError, UsageError
from kvtrace.metrics import names
from kvtrace.metrics.engines import Engines, Event, Place
from kvtrace.metrics.values import Values
from kvtrace.modes import PUSH
from kvtrace.verdict import ABORTED, ALARMING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kvtrace.collect import Stats
    from kvtrace.store import Store

Row = dict[str, Any]
Name = tuple[str, int]
"""What a request is known by from one analysis to the next: its id, and when it began, unix ns."""

LOOPBACK = "127.0.0.1"
STATES = ("recording", "failing", "complete")
_ARRIVED_NS = 1_000_000_000
_REMEMBERED_MAX = 500_000
_COLUMNS = ("t_ns", "stage", "process", "request", "ref", "a", "b", "c", "d")
_CLASSES = tuple((f"{kind.value.replace('.', '_')}_ns", kind.value) for kind in stages.Class)
_REGISTERED = ("in_time", "late")
_OF_KEYS = "request_key BETWEEN $least AND $most AND list_contains($keys::BIGINT[], request_key)"
_OVER_SQL = f"""
SELECT request_id, start_ns, mode, verdict, scope, prefill_engine, decode_engine, ttft_ns, compute_run_ns,
  compute_queue_ns, coordination_ns,
  transfer_ns, unattributed_ns, registration_late_ns
FROM request WHERE {_OF_KEYS}
"""  # noqa: S608 -- of ours
_CAUSES_SQL = f"""
SELECT s.cause, s.class, r.mode, r.scope, sum(s.end_ns - s.start_ns)::BIGINT AS spent_ns
FROM segment AS s JOIN request AS r USING (request_key)
WHERE {_OF_KEYS} GROUP BY ALL
"""  # noqa: S608 -- of ours
_PACE_SQL = f"""
SELECT r.mode, r.decode_engine, p.tpot_ns, p.extension_ns FROM pace AS p JOIN request AS r USING (request_key)
WHERE {_OF_KEYS}
"""  # noqa: S608 -- of ours
_ARRIVED_SQL = """
SELECT request_id, start_ns, mode, prefill_engine, decode_engine FROM request
WHERE start_ns BETWEEN $since AND $until
"""
_LOST_SQL = "SELECT kind, sum(lost_records)::BIGINT AS lost FROM engine_process GROUP BY kind"
_PLACES_SQL = "SELECT process, kind, engine FROM engine_process"
_FACTS_SQL = "SELECT name, value FROM run WHERE name IN ('model', 'connector')"


class MetricsObserver:
    """Keeps every metric of the table up to date while a recording goes on."""

    def __init__(
        self,
        output: Path,
        spools: Callable[[], Iterable[Path]],
        spans: Callable[[], Mapping[str, int]] = dict,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Start at zero. `spools` says which folders are followed, `spans` what became of spans by outcome.

        `now_ns` is the clock, unix ns.
        """
        self.values = Values({"run": output.stem})
        self._spools = spools
        self._spans = spans
        self._now_ns = now_ns
        self._places: dict[int, Place] = {}
        self._engines = Engines(self.values, lambda process: self._places.get(process, Place("", "")))
        self._wanted = pa.array(sorted(self._engines.stages))
        self._arrived: dict[Name, None] = {}
        self._in_flight: dict[Name, None] = {}
        self._stats: Stats | None = None
        self._started_ns = now_ns()
        self.values.put(names.RUN_INFO, 1)
        self._state("recording")

    def took(self, store: Store, events: pa.Table) -> None:
        """Count events, and what they say of engines."""
        self.values.add(names.EVENTS, events.num_rows)
        told = events.filter(pc.is_in(events.column("stage").cast(pa.string()), self._wanted))
        columns = [told.column(name).to_pylist() for name in _COLUMNS]
        found = [Event(*row) for row in zip(*columns, strict=True)]
        if any(event.process not in self._places for event in found):
            self._places = {row["process"]: Place(row["engine"], row["kind"]) for row in store.rows(_PLACES_SQL)}
        self._engines.add(found)
        self._engines.advance(self._now_ns())

    def over(self, store: Store, keys: Sequence[int], stats: Stats) -> None:
        """Count the requests that are over, and say how the recorder is."""
        self.values.state_common({row["name"]: row["value"] for row in store.rows(_FACTS_SQL)})
        self._count_arrivals(store)
        if keys:
            of_keys = {"keys": list(keys), "least": min(keys), "most": max(keys)}
            for row in store.rows(_OVER_SQL, of_keys):
                self._count_arrival(row)
                self._count(row)
                self._in_flight.pop((row["request_id"], row["start_ns"]), None)
            for row in store.rows(_CAUSES_SQL, of_keys):
                labels = row["cause"], row["class"], row["mode"] or "", row["scope"] or ""
                self.values.add(names.CAUSE, row["spent_ns"] / 1e9, *labels)
            for row in store.rows(_PACE_SQL, of_keys):
                if row["tpot_ns"] is not None:
                    self.values.observe(names.TPOT, row["tpot_ns"] / 1e9, row["mode"] or "", row["decode_engine"] or "")
                self.values.add(names.EXTENSION, (row["extension_ns"] or 0) / 1e9, row["decode_engine"] or "")
        self.values.put(names.IN_FLIGHT, len(self._in_flight))
        self._engines.advance(self._now_ns())
        self._state_recorder(store, stats)

    def _count(self, row: Row) -> None:
        mode, scope = row["mode"] or "", row["scope"] or ""
        pair = row["prefill_engine"] or "", row["decode_engine"] or ""
        self._begin(mode, pair)
        self.values.add(names.REQUESTS, 1, mode, row["verdict"] or "", *pair)
        late_ns = row["registration_late_ns"]
        if late_ns is not None and mode == PUSH:
            for outcome in _REGISTERED:
                self.values.begin(names.REGISTRATIONS, outcome, *pair)
            self.values.add(names.REGISTRATIONS, 1, "late" if late_ns > 0 else "in_time", *pair)
            if late_ns > 0:
                self.values.observe(names.LATENESS, late_ns / 1e9, *pair)
        if row["ttft_ns"] is not None:
            self.values.observe(names.TTFT, row["ttft_ns"] / 1e9, mode, scope, *pair)
            for column, kind in _CLASSES:
                self.values.observe(names.CLASS, (row[column] or 0) / 1e9, kind, mode, scope, *pair)

    def _count_arrivals(self, store: Store) -> None:
        """Count each request once it has been there for a moment, under what is known of it by then.

        One that has another id or beginning by now is in flight under that, and one of which nobody tells any more
        that it ended, since its engine was killed, has been for long enough.
        """
        now_ns = self._now_ns()
        since_ns = max(self._started_ns - _ARRIVED_NS, now_ns - KEEP_NS)
        rows = store.rows(_ARRIVED_SQL, {"since": since_ns, "until": now_ns - _ARRIVED_NS})
        there = {(row["request_id"], row["start_ns"]) for row in rows}
        for name in list(self._in_flight):
            if (name not in there and name[1] >= since_ns) or name[1] < now_ns - TOLD_NS:
                del self._in_flight[name]
        for row in rows:
            self._count_arrival(row)
        for memory in (self._arrived, self._in_flight):
            while len(memory) > _REMEMBERED_MAX:
                del memory[next(iter(memory))]

    def _count_arrival(self, row: Row) -> None:
        key = row["request_id"], row["start_ns"]
        if key not in self._arrived:
            self._arrived[key] = self._in_flight[key] = None
            mode, pair = row["mode"] or "", (row["prefill_engine"] or "", row["decode_engine"] or "")
            self.values.add(names.ARRIVALS, 1, mode, *pair)
            self._begin(mode, pair)

    def _begin(self, mode: str, pair: tuple[str, str]) -> None:
        """Show 0 from the first request of a pair on, so that the first one that ends badly is seen to come."""
        for verdict in (*ALARMING, ABORTED):
            self.values.begin(names.REQUESTS, mode, verdict, *pair)

    def _state_recorder(self, store: Store, stats: Stats) -> None:
        self._stats = stats
        self.values.put(names.LAG, stats.lag_s)
        self.values.put(names.SKIPPED, stats.skipped_files)
        if stats.published:
            self.values.put(names.PUBLISHED, stats.published_ns / 1e9)
            self.values.put(names.PUBLISHING, stats.publishing_s)
        for row in store.rows(_LOST_SQL):
            self.values.put(names.LOST, row["lost"] or 0, row["kind"])
            self.values.begin(names.SILENCED, row["kind"])
        self.values.put(names.SPOOL, sum(map(_size_bytes, self._spools())))
        for outcome, count in self._spans().items():
            self.values.put(names.SPANS, count, outcome)
        self._state("failing" if stats.failing else "recording")

    def _state(self, state: str) -> None:
        for one in STATES:
            self.values.put(names.STATE, float(one == state), one)

    def facts(self) -> dict[str, str]:
        """Return nothing: what metrics show stands in the store anyway."""
        return {}

    def finish(self) -> None:
        """Work off what was held back."""
        self._engines.advance(self._now_ns() + KEEP_NS)
        self._state("complete")


def _size_bytes(folder: Path) -> int:
    """Return the size of a folder's spool files; those that go meanwhile count for nothing."""
    total = 0
    for file in folder.glob("*.kvt"):
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total


class Endpoint:
    """An HTTP endpoint that Prometheus can scrape, at /metrics. Use as a context manager."""

    def __init__(self, values: Values, host: str, port: int) -> None:
        """Listen; port 0 is a free one. Raises ExportError where that is not possible."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(values)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "there is no such address"
            raise ExportError(f"--metrics {host}:{port} cannot be listened on: {why}; name another port") from error
        self._server.set_app(_guarded(self._server.get_app()))
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _guarded(app: Any) -> Any:
    """Return the application with a plain answer to what makes it fail, which would be a traceback on stderr."""

    def answer(environ: Any, start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except Exception as error:  # noqa: BLE001 -- whatever a client sends is none of the recording's business
            start_response("400 Bad Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{type(error).__name__}: {error}\n".encode()]

    return answer


def address(text: str) -> tuple[str, int]:
    """Return host and port of [HOST:]PORT; without a host it is loopback. Raises UsageError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"--metrics wants a port, or HOST:PORT, not {text!r}")
    return host.strip("[]") or LOOPBACK, int(port)
