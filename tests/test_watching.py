"""While a recording goes on: a request that is over is told once; a receiver that is away costs nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace as otel

from kvtrace import cli
from kvtrace.collect import Recorder
from kvtrace.collect.observing import SETTLE_NS, Audience
from kvtrace.collect.stats import Stats
from kvtrace.exporters.live import SpanObserver
from kvtrace.exporters.otlp import Sender
from kvtrace.store import Store
from tests import exported
from tests.emitted import emit
from tests.otlp_receiver import RECEIVERS, values
from tests.trace import pull, push
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
DEAD = "http://127.0.0.1:9"


class Looking:
    """An observer that keeps what it is told, and can fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events = 0
        self.ids: list[str] = []
        self.finished = 0
        self._error = error

    def took(self, store: Store, events: Any) -> None:
        self.events += events.num_rows
        if self._error is not None:
            raise self._error

    def over(self, store: Store, keys: Sequence[int], stats: Any) -> None:
        rows = store.rows(
            "SELECT request_id FROM request WHERE list_contains($keys, request_key)", {"keys": list(keys)}
        )
        self.ids += [row["request_id"] for row in rows]

    def facts(self) -> dict[str, str]:
        return {"recorder.looked": str(len(self.ids))}

    def finish(self) -> None:
        self.finished += 1


def recorder(tmp_path: Path, *observers: Any) -> Recorder:
    return Recorder(
        tmp_path / "run.duckdb", [tmp_path / "spool"], {"model": "tiny"}, publish_interval_s=0.2, observers=observers
    )


def run_facts(tmp_path: Path) -> dict[str, str]:
    with Store.open(tmp_path / "run.duckdb") as store:
        return {row["name"]: row["value"] for row in store.rows("SELECT * FROM run")}


# Who is told, and when ---------------------------------------------------------------------------------------


def test_a_request_is_told_once_and_when_it_is_over(tmp_path: Path) -> None:
    """While the recording goes on; what is not over is told at the end, as it stands."""
    looking = Looking()
    half = push(name="kvt-half")
    half.events = half.events[:12]
    with recorder(tmp_path, looking) as recording:
        recording.start()
        emit(tmp_path / "spool", push(name="kvt-a"), pull("kvt-b"), half)
        until(lambda: len(looking.ids) == 2)
        emit(tmp_path / "spool", push(name="kvt-c"))
        until(lambda: len(looking.ids) == 3)
        time.sleep(2.5)  # more analyses, which write the same rows anew
        while_recording = sorted(looking.ids)

    assert while_recording == ["kvt-a", "kvt-b", "kvt-c"]
    assert sorted(looking.ids) == ["kvt-a", "kvt-b", "kvt-c", "kvt-half"]
    assert looking.events == recording.stats.events
    assert looking.finished == 1
    assert run_facts(tmp_path)["recorder.looked"] == "4"


def test_a_request_is_over_when_what_came_behind_its_end_is_in_the_store(tmp_path: Path) -> None:
    """And not when its end is so long ago: an analysis takes longer at times, and some of its points may be unread."""
    looking = Looking()
    audience = Audience([looking], pytest.fail)
    with Store.open(exported.write(tmp_path / "run.duckdb", push(name="kvt-a"))) as store:
        audience.took(store, store.arrow("SELECT * FROM event"))
        ends = "SELECT max(t_ns) FROM event WHERE stage IN ('router.done', 'decode.http_done', 'decode.finished')"
        settled_ns = store.select(ends).values[0][0] + SETTLE_NS
        told = []
        for taken_in_ns in (settled_ns - 1, settled_ns):
            audience.took_in(taken_in_ns)
            audience._next_s = 0.0
            audience.analyzed(store, Stats())
            told.append(list(looking.ids))

    assert told == [[], ["kvt-a"]]


@pytest.mark.parametrize("comes_meanwhile", [False, True])
def test_a_request_is_told_by_answers_that_know_its_end(tmp_path: Path, comes_meanwhile: bool) -> None:
    """Not when what came with its end was read in while they were worked out, nor when its end itself was, long after.

    A spool that is brought from elsewhere may bring old ends.
    """
    looking = Looking()
    audience = Audience([looking], pytest.fail)
    with (
        Store.open(exported.write(tmp_path / "before.duckdb")) as before,
        Store.open(exported.write(tmp_path / "run.duckdb", push(name="kvt-a"))) as store,
    ):
        steps = [
            lambda: audience.took(store, store.arrow("SELECT * FROM event")),
            audience.analysis_begins,
            lambda: audience.took_in(time.time_ns()),
        ]
        for step in reversed(steps) if comes_meanwhile else steps:
            step()
        told = []
        for answered in (before if comes_meanwhile else store, store):
            audience._next_s = 0.0
            audience.analyzed(answered, Stats())
            told.append(list(looking.ids))
            audience.analysis_begins()

    assert told == [[], ["kvt-a"]]


def test_an_observer_that_fails_is_noted_and_the_recording_goes_on(tmp_path: Path) -> None:
    emit(tmp_path / "spool", push(name="kvt-a"))
    recording = recorder(tmp_path, Looking(ValueError("no <b>luck</b>")), looking := Looking())
    recording.run_once()

    assert looking.ids == ["kvt-a"]
    assert [line for line in recording.stats.messages if "no <b>luck</b>" in line]
    assert recording.stats.requests == 1


# Spans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", RECEIVERS)
def test_spans_arrive_while_the_recording_goes_on(tmp_path: Path, transport: str) -> None:
    """Each request's trace once, continuing its client's; nobody's global provider is touched."""
    traced = push(name="kvt-a")
    traced.events += exported.traced("kvt-a").events
    with (
        RECEIVERS[transport]() as received,
        recorder(tmp_path, SpanObserver(Sender(received.endpoint, {}))) as recording,
    ):
        recording.start()
        emit(tmp_path / "spool", traced, pull("kvt-b"))
        until(lambda: len([span for span in received.spans() if span.name == "kvtrace.request"]) == 2)
        while_recording = len(received.spans())

    spans = received.spans()
    assert len(spans) == while_recording == len({span.span_id for span in spans})
    first = {span.name: span for span in spans if span.trace_id == exported.TRACE_ID.to_bytes(16)}
    assert first["kvtrace.request"].parent_span_id == exported.CLIENT_SPAN.to_bytes(8)
    assert first["kvtrace.transfer"].parent_span_id == first["kvtrace.prefill"].span_id
    assert values(first["kvtrace.request"].attributes)["gen_ai.request.model"] == "tiny"
    assert isinstance(otel.get_tracer_provider(), otel.ProxyTracerProvider)
    assert run_facts(tmp_path)["recorder.otlp_exported_spans"] == str(len(spans))


def test_a_client_that_does_not_sample_is_heeded_unless_its_request_failed(tmp_path: Path) -> None:
    fine, lost = push(name="kvt-a"), exported.failed("kvt-b")
    fine.events += exported.traced("kvt-a", flags="00").events
    lost.events += exported.traced("kvt-b", flags="00").events
    emit(tmp_path / "spool", fine, lost, push(name="kvt-c"))
    with RECEIVERS["http"]() as received:
        recorder(tmp_path, SpanObserver(Sender(received.endpoint, {}))).run_once()

    roots = [values(span.attributes) for span in received.spans() if span.name == "kvtrace.request"]
    assert {attributes["kvtrace.request_id"] for attributes in roots} == {"kvt-b", "kvt-c"}
    assert run_facts(tmp_path)["recorder.otlp_unsampled_requests"] == "1"


def test_a_dead_receiver_costs_counted_drops_and_nothing_else(tmp_path: Path) -> None:
    """Nobody waits for it: what is recorded is the same, and the end comes within the time that is left for sending."""
    observer = SpanObserver(Sender(DEAD, {}, timeout_s=300))
    with recorder(tmp_path, observer) as recording:
        recording.start()
        emit(tmp_path / "spool", *(push(name=f"kvt-{number}") for number in range(5)), apart_ms=10)
        until(lambda: recording.stats.requests == 5)
        time.sleep(3)
        begin_s = time.monotonic()
    stopped_s = time.monotonic() - begin_s

    facts = run_facts(tmp_path)
    assert stopped_s < 40  # ten are given it; the exporter alone would try for more than a minute
    assert recording.stats.lost == 0
    assert int(facts["recorder.otlp_dropped_spans"]) >= 5 * 5
    assert facts["recorder.otlp_exported_spans"] == "0"
    assert facts["recorder.otlp_failure"]
    assert observer.health.dropped == int(facts["recorder.otlp_dropped_spans"])


# The command -------------------------------------------------------------------------------------------------


def test_record_says_where_and_what_was_sent(tmp_path: Path) -> None:
    emit(tmp_path / "spool", push(name="kvt-a"))
    with RECEIVERS["grpc"]() as received:
        done = subprocess.run(
            [
                sys.executable, "-m", "kvtrace", "record", "-o", tmp_path / "run.duckdb", "--spool", tmp_path / "spool",
                "--once", "--otlp", received.endpoint, "--metrics", "0",
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip

    assert "kvtrace: metrics at http://127.0.0.1:" in done.stderr
    assert f"sent {len(received.spans())} spans to {received.endpoint}" in done.stderr
    assert len(received.spans()) >= 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--metrics", "x"], "--metrics wants a port"),
        (["--metrics", "70000"], "--metrics wants a port"),
        (["--metrics", "203.0.113.1:0"], "cannot be listened on"),
        (["--otlp", "nowhere"], "no OTLP endpoint"),
        (["--otlp-share", "0.5"], "--otlp-share belongs to --otlp"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    marker = tmp_path / "started"
    code = cli.main(["record", "-o", str(tmp_path / "run.duckdb"), *arguments, "--", "touch", str(marker)])

    assert code == (1 if "listened" in said else 2)  # another machine has that address
    assert said in capfd.readouterr().err
    assert not marker.exists()
    assert not (tmp_path / "run.duckdb").exists()
