"""Prometheus metrics: names and units by its conventions, values equal to the store's, series bounded."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtrace import stages
from kvtrace.collect import Recorder
from kvtrace.collect.stats import Stats
from kvtrace.emit import Emitter
from kvtrace.metrics import names
from kvtrace.metrics.engines import Engines, Event, Place
from kvtrace.metrics.live import Endpoint, MetricsObserver
from kvtrace.metrics.values import Values
from kvtrace.store import Store
from tests.emitted import emit
from tests.exported import failed
from tests.sample_store import MS, START_NS, Sample
from tests.trace import Trace, pull, push
from tests.waiting import LONG_S, until

if TYPE_CHECKING:
    from pathlib import Path

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
COMMON = {"run": "run", "model": "tiny", "connector": "NixlPush"}


def scrape(endpoint: Endpoint) -> str:
    with urllib.request.urlopen(endpoint.url, timeout=LONG_S) as answer:  # noqa: S310 -- loopback
        text: str = answer.read().decode()
    return text


def samples(text: str) -> Samples:
    """Return every sample by name and labels; the parser refuses what Prometheus would."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def total(found: Samples, name: str, **labels: str) -> float:
    """Return the sum of a name's samples that bear these labels."""
    wanted = {key.rstrip("_"): value for key, value in labels.items()}.items()
    return sum(value for (one, own), value in found.items() if one == name and wanted <= dict(own).items())


def record(tmp_path: Path, *traces: Trace, apart_ms: float = 5.0) -> tuple[str, Path]:
    """Record traces and return what an endpoint shows at the end, and the store."""
    spool, output = tmp_path / "spool", tmp_path / "run.duckdb"
    emit(spool, *traces, apart_ms=apart_ms)
    observer = MetricsObserver(output, lambda: [spool], lambda: {"exported": 3, "dropped": 0})
    with Endpoint(observer.values, "127.0.0.1", 0) as endpoint:
        Recorder(output, [spool], {}, observers=[observer]).run_once()
        return scrape(endpoint), output


def many(count: int) -> list[Trace]:
    """Return requests of distinct ids."""
    return [push(name=f"kvt-{number:05d}") if number % 2 else pull(f"kvt-{number:05d}") for number in range(count)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Samples, Path, str]:
    traces = [*many(20), push(44.0, "kvt-late"), failed("kvt-failed"), faults()]
    text, output = record(tmp_path_factory.mktemp("run"), *traces)
    return samples(text), output, text


def faults() -> Trace:
    """Return what goes wrong without a request of its own."""
    trace = Trace().at(1, stages.LEASE_EXPIRED, "cmpl-x-0-aaaaaaaa", process=2)
    trace.at(2, stages.TRANSFER_FAILED, "cmpl-x-0-aaaaaaaa", 99, ref="gone", process=2)
    trace.at(2, stages.HANDSHAKE_ENDED, "", 0, 1, ref="engine-d", process=2)
    trace.at(3, stages.HANDSHAKE_ENDED, "", 0, 0, ref="engine-d", process=2)
    return trace.at(4, stages.DISABLED, ref="emit: no", process=3)


def test_counts_are_the_stores(shown: tuple[Samples, Path, str]) -> None:
    """Sums of seconds equal the store's nanoseconds; a request's classes sum to its TTFT."""
    found, output, _ = shown
    with Store.open(output) as store:
        row = store.rows(
            "SELECT count(*) AS requests, count(ttft_ns) AS timed, sum(ttft_ns)::BIGINT AS ttft_ns, "
            "sum(coordination_ns)::BIGINT AS coordination_ns FROM request"
        )[0]
        causes = store.rows("SELECT cause, sum(end_ns - start_ns)::BIGINT AS ns FROM segment GROUP BY cause")
        events = store.rows("SELECT count(*) AS n FROM event")[0]["n"]
    ttft_s = row["ttft_ns"] / 1e9

    assert total(found, "kvtrace_requests_total") == total(found, "kvtrace_arrivals_total") == row["requests"]
    assert total(found, "kvtrace_ttft_seconds_count") == row["timed"]
    assert total(found, "kvtrace_ttft_seconds_sum") == pytest.approx(ttft_s, abs=1e-9)
    assert total(found, "kvtrace_ttft_class_seconds_sum") == pytest.approx(ttft_s, abs=1e-9)
    coordination_s = total(found, "kvtrace_ttft_class_seconds_sum", class_="coordination")
    assert coordination_s == pytest.approx(row["coordination_ns"] / 1e9, abs=1e-9)
    for cause in causes:
        spent_s = total(found, "kvtrace_ttft_cause_seconds_total", cause=cause["cause"])
        assert spent_s == pytest.approx(cause["ns"] / 1e9, abs=1e-9), cause
    # Scopes do not compare, so a cause's time can be told by them, as the whole can.
    assert total(found, "kvtrace_ttft_cause_seconds_total", scope="router") == pytest.approx(ttft_s, abs=1e-9)
    assert total(found, "kvtrace_events_total") == events
    assert total(found, "kvtrace_in_flight_requests") == 0


def test_transfers_leases_and_failures_are_counted(shown: tuple[Samples, Path, str]) -> None:
    found, _, _ = shown
    moved = 10 + 10 + 1  # the failed one never wrote

    assert total(found, "kvtrace_transfers_total", outcome="done") == moved
    assert total(found, "kvtrace_transfers_total", outcome="done", engine="engine-d") == 10
    assert total(found, "kvtrace_transfers_total", outcome="failed") == 1
    assert total(found, "kvtrace_transfer_bytes_total") == moved * 1_300_000
    assert total(found, "kvtrace_transfer_descriptors_sum") == moved * 20
    assert total(found, "kvtrace_transfer_post_seconds_count") == moved
    # A write is noticed by D after 6 ms, before P's poll says so after 7; a read by D's own poll after 4.
    assert total(found, "kvtrace_transfer_seen_seconds_sum") == pytest.approx(11 * 0.006 + 10 * 0.004, abs=1e-9)
    assert total(found, "kvtrace_handshakes_total", outcome="done") == 1
    assert total(found, "kvtrace_handshakes_total", outcome="failed") == 1
    assert total(found, "kvtrace_leases_expired_total", engine="engine-p") == 1
    assert total(found, "kvtrace_silenced_processes", kind="core") == 1
    assert total(found, "kvtrace_registrations_total", outcome="late") == 1
    assert total(found, "kvtrace_registrations_total", outcome="in_time") >= 10
    assert total(found, "kvtrace_requests_total", verdict="failed") == 1
    assert total(found, "kvtrace_otlp_spans_total", outcome="exported") == 3


def test_steps_and_queues_are_told_per_engine(shown: tuple[Samples, Path, str]) -> None:
    found, _, _ = shown
    prefills, decodes = 22, 21

    assert total(found, "kvtrace_steps_total", engine="engine-p") == prefills
    assert total(found, "kvtrace_steps_total", engine="engine-d") == decodes
    assert total(found, "kvtrace_step_seconds_total", engine="engine-d") == pytest.approx(decodes * 0.008, abs=1e-9)
    assert total(found, "kvtrace_connector_seconds_total", engine="engine-d") == pytest.approx(decodes * 5e-4, abs=1e-9)
    # D was not told that one request had failed on P.
    assert total(found, "kvtrace_waiting_requests") == total(found, "kvtrace_waiting_for_kv_requests") == 1
    assert total(found, "kvtrace_reserved_blocks", engine="engine-d") == 38
    assert total(found, "kvtrace_held_blocks", engine="engine-p") == 22 * 38  # nobody lets go in these traces


def test_every_series_bears_the_runs_labels_and_the_tables_metrics_only(shown: tuple[Samples, Path, str]) -> None:
    found, _, _ = shown
    known = {sample for metric in names.METRICS for sample in names.series_of(metric)}

    assert {name for name, _ in found} <= known
    labels = {name: metric.labels for metric in names.METRICS for name in names.series_of(metric)}
    for name, own in found:
        assert {key for key, _ in own} - {"le"} == {*names.COMMON, *labels[name]}
        assert {key: value for key, value in own if key in COMMON} == COMMON


def test_series_do_not_grow_with_requests(tmp_path: Path) -> None:
    """Three hundred distinct ids leave as many series as twenty, and no id is among the labels."""
    few, _ = record(tmp_path / "few", *many(20))
    text, output = record(tmp_path / "many", *many(300))

    assert total(samples(text), "kvtrace_requests_total") == 300
    assert {key for key in samples(text)} == {key for key in samples(few)}  # noqa: C416 -- keys, not values
    assert "kvt-0" not in text
    assert output.exists()


def test_what_has_not_gone_wrong_yet_is_zero_and_not_missing(tmp_path: Path) -> None:
    """Of a series that begins at 1 Prometheus cannot tell that it grew, so the first failure would alarm nobody."""
    text, _ = record(tmp_path, push(name="kvt-a"))
    found = {key: value for key, value in samples(text).items() if not value}

    def zero(name: str, **labels: str) -> bool:
        return any(one == name and labels.items() <= dict(own).items() for one, own in found)

    for verdict in ("failed", "expired", "corrupt"):
        assert zero("kvtrace_requests_total", verdict=verdict, mode="push", prefill="engine-p", decode="engine-d")
    for engine in ("engine-p", "engine-d"):
        assert zero("kvtrace_leases_expired_total", engine=engine)
        assert zero("kvtrace_transfers_total", engine=engine, outcome="failed")
        assert zero("kvtrace_handshakes_total", engine=engine, outcome="failed")
    assert zero("kvtrace_registrations_total", outcome="late", prefill="engine-p", decode="engine-d")
    for name in ("kvtrace_lost_records_total", "kvtrace_silenced_processes"):
        assert all(zero(name, kind=kind) for kind in ("core", "api", "router"))


def test_a_write_is_seen_by_the_rank_that_it_is_for() -> None:
    """The notification of another rank's write is no sign of it, and none from before its own post."""
    values = Values({})
    engines = Engines(values, lambda _: Place("engine-p", "worker"))
    trace = Trace()
    for rank, posted_ms, told_ms, done_ms in ((0, 10, 12, 13), (1, 20, 26, 29), (2, 30, 5, 33)):
        trace.at(posted_ms - 1, stages.PREPARED, "p", rank, 20, rank, ref="d", process=2)
        trace.at(posted_ms, stages.POST_STARTED, "p", rank, process=2)
        trace.at(posted_ms + 1, stages.POST_ENDED, "p", rank, 1000, 20, 0, process=2)
        trace.at(told_ms, stages.NOTIFIED, "d", rank, process=2)
        trace.at(done_ms, stages.TRANSFER_DONE, "p", rank, process=2)
    engines.add(Event(*event) for event in trace.events)
    engines.advance(trace.events[-1].t_ns + 10_000_000_000)
    (seen,) = (family for family in values.collect() if family.name == "kvtrace_transfer_seen_seconds")

    total_s = next(sample.value for sample in seen.samples if sample.name.endswith("_sum"))
    assert total_s == pytest.approx(0.002 + 0.006 + 0.003, abs=1e-9)


def test_engines_beyond_the_cap_share_one_value() -> None:
    values = Values({})
    for number in range(1000):
        values.add(names.STEPS, 1, f"engine-{number}")
        values.observe(names.TTFT, 0.1, "push", "router", f"p{number}", f"d{number}")
    by_name = {family.name: family for family in values.collect()}

    steps = by_name["kvtrace_steps"].samples
    assert len(steps) <= names.ENGINES_MOST + 1
    assert sum(sample.value for sample in steps) == 1000
    assert {sample.labels["engine"] for sample in steps} >= {names.OTHER, "engine-0"}


def test_hostile_label_values_are_escaped(tmp_path: Path) -> None:
    """A model's or an engine's name may hold quotes, line breaks and markup."""
    hostile = 'a"b\\c\nd<script>{x="y"} 1'
    values = Values({"run": hostile, "model": hostile})
    values.add(names.STEPS, 2, hostile)
    with Endpoint(values, "127.0.0.1", 0) as endpoint:
        found = samples(scrape(endpoint))

    assert total(found, "kvtrace_steps_total", engine=hostile, model=hostile) == 2


def test_a_request_that_makes_the_library_fail_is_refused_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever can reach the port cannot fill the recorder's stderr."""
    with Endpoint(Values({}), "127.0.0.1", 0) as endpoint:
        asked = urllib.request.Request(  # noqa: S310 -- loopback
            endpoint.url, headers={"Accept": "application/openmetrics-text; version=x"}
        )
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(asked, timeout=LONG_S)  # noqa: S310 -- loopback
        assert "kvtrace_events_total" in scrape(endpoint)

    assert capfd.readouterr().err == ""


def test_a_scrape_during_a_recording_moves(tmp_path: Path) -> None:
    """The spool's bytes are those of a writer that lives on: what is in the store of the others is deleted."""
    spool, output = tmp_path / "spool", tmp_path / "run.duckdb"
    observer = MetricsObserver(output, lambda: [spool])
    with (
        contextlib.closing(Emitter(spool)),
        Endpoint(observer.values, "127.0.0.1", 0) as endpoint,
        Recorder(output, [spool], {}, publish_interval_s=0.2, observers=[observer]) as recorder,
    ):
        recorder.start()

        def requests() -> float:
            return total(samples(scrape(endpoint)), "kvtrace_requests_total")

        assert requests() == 0
        emit(spool, push(name="kvt-a"), pull("kvt-b"))
        until(lambda: requests() == 2)
        emit(spool, pull("kvt-c"))
        until(lambda: requests() == 3)
        found = samples(scrape(endpoint))

    assert total(found, "kvtrace_recorder_state", state="recording") == 1
    assert total(found, "kvtrace_recorder_published_timestamp_seconds") > 1.7e9
    assert total(found, "kvtrace_spool_bytes") > 0


def test_in_flight_is_what_has_come_and_not_ended_whatever_it_is_called(tmp_path: Path) -> None:
    """Three come; the first gets its front end's id, the second ends, and of the third nobody hears again."""
    sample = Sample()
    for number in range(3):
        sample.add(f"r{number}", start_ms=number)
    now_ns = START_NS + 2_000 * MS
    observer = MetricsObserver(tmp_path / "run.duckdb", list, now_ns=lambda: now_ns)

    def in_flight(keys: list[int]) -> float:
        observer.over(store, keys, Stats())
        ((_, found),) = observer.values._numbers["kvtrace_in_flight_requests"].items()
        return found

    observer._started_ns = START_NS
    with Store.open(sample.write(tmp_path / "run.duckdb"), "write") as store:
        assert in_flight([]) == 3
        store.execute("UPDATE request SET request_id = 'kvt-0', start_ns = start_ns - 1 WHERE request_id = 'r0'")
        assert in_flight([]) == 3
        (key,) = (row["request_key"] for row in store.rows("FROM request WHERE request_id = 'r1'"))
        assert in_flight([key]) == 2
        now_ns += 2_000_000 * MS
        assert in_flight([]) == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(shown: tuple[Samples, Path, str]) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=shown[2], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_follow_the_conventions() -> None:
    """Counters end in _total, units are base units and stand in the name, help ends as a sentence."""
    for metric in names.METRICS:
        assert metric.name.startswith("kvtrace_")
        assert metric.name.endswith("_total") == (metric.kind is names.Kind.COUNTER), metric.name
        stem = metric.name.removesuffix("_total")
        assert not metric.unit or stem.endswith(metric.unit), metric.name
        assert bool(metric.buckets) == (metric.kind is names.Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.doc.endswith(".")
        assert all(label in names.LABELS for label in metric.labels), metric.name
