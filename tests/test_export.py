"""`kvtrace export`: the files' own schemas, what stands in them, and what is refused."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from kvtrace import cli, schema
from kvtrace.exporters import otlp_json, perfetto, source
from kvtrace.exporters.lanes import Lanes
from kvtrace.store import Store
from tests import exported
from tests.otlp_receiver import values
from tests.sample_store import empty_store
from tests.trace import MS, START_NS

ROOT = Path(__file__).parent.parent
NAMES = ("kvt-push", "kvt-pull", "kvt-late", "kvt-failed", "kvt-slow", *exported.HOSTILE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported.write(tmp_path_factory.mktemp("store") / "run.duckdb", *exported.varied())


def export(run: Path, *arguments: object) -> int:
    return cli.main(["export", str(run), *map(str, arguments)])


def otlp_spans(data: bytes) -> list[list[tuple[str, Any]]]:
    """Return per line the spans with their service, read by the protocol's own classes."""
    found = []
    for line in data.splitlines():
        message = json_format.ParseDict(_with_base64(json.loads(line)), TracesData(), ignore_unknown_fields=False)
        found.append(
            [
                (values(group.resource.attributes)["service.name"], span)
                for group in message.resource_spans
                for scope in group.scope_spans
                for span in scope.spans
            ]
        )
    return found


def _with_base64(document: Any) -> Any:
    """Return the document with ids as plain protobuf JSON has them: OTLP's are hexadecimal instead."""
    if isinstance(document, list):
        return [_with_base64(one) for one in document]
    if not isinstance(document, dict):
        return document
    return {
        key: base64.b64encode(bytes.fromhex(value)).decode()
        if key in ("traceId", "spanId", "parentSpanId")
        else _with_base64(value)
        for key, value in document.items()
    }


@pytest.fixture(scope="module")
def otlp(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, Any]]]:
    target = tmp_path_factory.mktemp("otlp") / "run.jsonl"
    assert export(store, "--format", "otlp-json", "-o", target) == 0
    return otlp_spans(target.read_bytes())


@pytest.fixture(scope="module")
def drawn(store: Path) -> exported.Read:
    with Store.open(store) as opened:
        out = io.BytesIO()
        assert perfetto.write(opened, source.Choice(), out) == len(NAMES)
    return exported.Reader().parse(out.getvalue())


# OTLP --------------------------------------------------------------------------------------------------------


def by_name(spans: list[tuple[str, Any]]) -> dict[str, Any]:
    return {span.name: span for _, span in spans}


def test_a_push_is_one_trace_with_its_causes_linked(otlp: list[list[tuple[str, Any]]]) -> None:
    """The client's trace is continued; legs are siblings; P does the work of the hand-off, D notices it."""
    spans = by_name(otlp[0])
    services = {span.name: service for service, span in otlp[0]}

    def ms(span: Any) -> tuple[float, float]:
        return (span.start_time_unix_nano - START_NS) / MS, (span.end_time_unix_nano - START_NS) / MS

    root, prefill, decode = (spans[f"kvtrace.{name}"] for name in ("request", "prefill", "decode"))
    handoff, shake, transfer, noticed = (
        spans[f"kvtrace.{name}"] for name in ("handoff", "handshake", "transfer", "detection")
    )
    assert {span.trace_id for span in spans.values()} == {exported.TRACE_ID.to_bytes(16)}
    assert root.parent_span_id == exported.CLIENT_SPAN.to_bytes(8)
    assert prefill.parent_span_id == decode.parent_span_id == root.span_id
    assert handoff.parent_span_id == shake.parent_span_id == transfer.parent_span_id == prefill.span_id
    assert noticed.parent_span_id == decode.span_id
    assert [link.span_id for link in handoff.links] == [link.span_id for link in transfer.links] == [decode.span_id]
    assert [link.span_id for link in noticed.links] == [transfer.span_id]
    assert services["kvtrace.request"] == "kvtrace-router"
    assert services["kvtrace.transfer"] == "kvtrace-prefill"
    assert services["kvtrace.detection"] == "kvtrace-decode"
    assert (ms(root), ms(prefill), ms(decode)) == ((0, 95), (2, 32), (2, 90))
    assert (ms(handoff), ms(shake), ms(transfer)) == ((31, 45), (35.05, 35.4), (36, 42))
    assert values(root.attributes)["gen_ai.request.model"] == "tiny"
    assert values(root.attributes)["gen_ai.usage.input_tokens"] == 600
    assert values(transfer.attributes)["kvtrace.transfer.moved_bytes"] == 1_300_000
    assert next(event.name for event in root.events) == "router.received"


def test_a_pull_reads_on_d_and_a_trace_may_begin_at_the_router(otlp: list[list[tuple[str, Any]]]) -> None:
    spans = by_name(otlp[1])

    assert spans["kvtrace.request"].span_id == exported.OWN_SPAN.to_bytes(8)
    assert spans["kvtrace.transfer"].parent_span_id == spans["kvtrace.decode"].span_id
    assert [link.span_id for link in spans["kvtrace.transfer"].links] == [spans["kvtrace.prefill"].span_id]


def test_a_failure_is_an_error_with_its_reason(otlp: list[list[tuple[str, Any]]]) -> None:
    root = by_name(otlp[3])["kvtrace.request"]

    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert "prefill: <b>lost</b>" in root.status.message
    assert values(root.attributes)["error.type"] == "failed"
    assert values(root.attributes)["http.response.status_code"] == 502


def test_every_span_is_within_one_trace_and_ids_are_stable(store: Path, otlp: list[list[tuple[str, Any]]]) -> None:
    with Store.open(store) as opened:
        facts = otlp_json_facts(opened)
        again = io.BytesIO()
        otlp_json.write(
            (spans(told, facts) for batch in source.batches(opened, source.Choice(), 3) for told in batch), again, {}
        )
    second = otlp_spans(again.getvalue())

    for spans_of_one, same in zip(otlp, second, strict=True):
        ids = [span.span_id for _, span in spans_of_one]
        assert len(set(ids)) == len(ids)
        assert ids == [span.span_id for _, span in same]
        assert len({span.trace_id for _, span in spans_of_one}) == 1
        known = {*ids, b"", exported.CLIENT_SPAN.to_bytes(8)}
        assert all(span.parent_span_id in known for _, span in spans_of_one)
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans_of_one)
    roots = [by_name(spans_of_one)["kvtrace.request"].trace_id for spans_of_one in otlp[2:]]
    assert len(set(roots)) == len(roots)


def otlp_json_facts(opened: Store) -> Any:
    from kvtrace.exporters.spans import RunFacts

    return RunFacts.of(opened)


def spans(told: source.Told, facts: Any) -> Any:
    from kvtrace.exporters import traces

    return traces.spans(told, facts)


# Perfetto ----------------------------------------------------------------------------------------------------


def test_the_critical_path_is_a_track_that_tiles_each_request(drawn: exported.Read) -> None:
    paths = [one for track, some in drawn.slices.items() if track[0] == "critical path" for one in some]

    assert sorted(one.notes["request_id"] for one in paths) == sorted(NAMES)
    for path in paths:
        now_ns = path.start_ns
        for segment in path.inside:
            assert segment.start_ns == now_ns
            now_ns = segment.end_ns
        if path.inside:
            assert now_ns == path.end_ns == path.start_ns + path.notes["ttft_ns"]


def test_engines_are_processes_and_arrows_lead_from_p_to_d(drawn: exported.Read) -> None:
    processes = {track[0] for track in drawn.slices}
    every = [*drawn.all(), *drawn.instants]
    leaves = {flow: one for one in every for flow in one.leaves}
    arrives = {flow: one for one in every for flow in one.arrives}

    assert processes == {"critical path", "router", "prefill engine-p", "decode engine-d"}
    handed = {
        (leaves[flow].track[0], leaves[flow].name, one.track[0], one.name)
        for flow, one in arrives.items()
        if flow in leaves
    }
    assert ("prefill engine-p", "transfer", "decode engine-d", "ready") in handed  # push
    assert ("prefill engine-p", "finished", "decode engine-d", "transfer") in handed  # pull
    assert ("router", "router.prefill_sent", "prefill engine-p", "prefill leg") in handed
    assert ("router", "router.decode_sent", "decode engine-d", "decode leg") in handed
    assert all(one.start_ns >= leaves[flow].start_ns for flow, one in arrives.items())


def test_steps_senders_and_counters_are_there(drawn: exported.Read) -> None:
    steps = drawn.slices["prefill engine-p", "core: steps"]
    first = drawn.slices["prefill engine-p", "core: forward thread"][0]

    assert ((steps[0].start_ns - START_NS) / MS, (steps[0].end_ns - START_NS) / MS) == (4, 31)
    assert [one.name for one in first.inside] == ["forward"]
    assert drawn.slices["prefill engine-p", "core: sender thread"]
    assert drawn.counters["prefill engine-p", "tokens in step"][0] == (START_NS + 4 * MS, 600)


def test_a_choice_exports_these_requests_only(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "some.jsonl"
    assert export(store, "--format", "otlp-json", "-o", target, "--requests", "kvt-pull", "--requests", "kvt-late") == 0
    chosen = otlp_spans(target.read_bytes())
    begin, end = "2001-09-09T01:46:40.2", "2001-09-09T01:46:40.6+00:00"  # START_NS and 200 to 600 ms
    assert export(store, "--format", "otlp-json", "-o", target, "--force", "--from", begin, "--to", end) == 0
    of_time = otlp_spans(target.read_bytes())

    ids = [[values(one[0][1].attributes)["kvtrace.request_id"] for one in some] for some in (chosen, of_time)]
    assert ids == [["kvt-pull", "kvt-late"], ["kvt-pull", "kvt-late"]]


def test_lanes_never_overlap_and_are_as_few_as_can_be() -> None:
    lanes = Lanes()
    given = [(0, 10), (1, 3), (2, 8), (3, 4), (5, 6), (10, 12), (11, 11), (11, 13)]
    taken = [lanes.take(*one) for one in given]

    assert taken == [0, 1, 2, 1, 1, 0, 1, 2]


# Parquet -----------------------------------------------------------------------------------------------------


def test_parquet_is_every_table_as_another_reader_sees_it(store: Path, tmp_path: Path) -> None:
    assert export(store, "--format", "parquet", "-o", tmp_path / "tables") == 0

    with Store.open(store) as opened:
        for table in schema.TABLES:
            read = pq.read_table(tmp_path / "tables" / f"{table.name}.parquet")
            expected = opened.arrow(f"SELECT * FROM {table.name}")  # noqa: S608 -- our tables
            assert read.column_names == [column.name for column in table.columns]
            assert read.num_rows == expected.num_rows
            for name in read.column_names:
                assert read.column(name).to_pylist() == expected.column(name).to_pylist(), (table.name, name)
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == sorted(
        f"{table.name}.parquet" for table in schema.TABLES
    )


def test_parquet_of_a_choice_holds_its_requests(store: Path, tmp_path: Path) -> None:
    assert export(store, "--format", "parquet", "-o", tmp_path / "t", "--requests", exported.HOSTILE[1]) == 0

    request = pq.read_table(tmp_path / "t" / "request.parquet").to_pylist()
    segments = pq.read_table(tmp_path / "t" / "segment.parquet").column("request_key").unique().to_pylist()
    events = pq.read_table(tmp_path / "t" / "event.parquet")
    assert [row["request_id"] for row in request] == [exported.HOSTILE[1]]
    assert segments == [request[0]["request_key"]]
    assert 0 < events.num_rows < pq.read_metadata(tmp_path / "t" / "event.parquet").num_rows + 1


def test_a_folder_with_a_hostile_name_is_written_to_and_no_other(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's; DROP TABLE x"
    assert export(store, "--format", "parquet", "-o", folder) == 0

    assert len(list(folder.glob("*.parquet"))) == len(schema.TABLES)


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "otlp"], "--endpoint"),
        (["--format", "perfetto", "--endpoint", "http://x"], "belong together"),
        (["--format", "otlp", "--endpoint", "ftp://x"], "no OTLP endpoint"),
        (["--format", "otlp", "--endpoint", "http://x:99999"], "no OTLP endpoint"),
        (["--format", "perfetto", "--from", "yesterday"], "--from wants a time"),
        (["--format", "perfetto", "--requests", "nobody"], "nobody"),
        (["--format", "parquet", "-o", "-"], "name a folder"),
        (["--format", "perfetto", "-o", "/nowhere/x"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    store: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert export(store, *arguments) in (1, 2)

    message = capsys.readouterr().err
    assert message.startswith("kvtrace: error: ")
    assert message.count("\n") == 1
    assert said in message


def test_nothing_is_overwritten_and_nothing_half_is_left(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.trace"
    target.write_text("mine")
    assert export(store, "--format", "perfetto", "-o", target) == 1
    assert export(store, "--format", "perfetto", "-o", tmp_path / "missing" / "x") == 1

    assert target.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_an_empty_store_exports_to_empty_files(tmp_path: Path) -> None:
    path = tmp_path / "empty.duckdb"
    path.write_bytes(empty_store())
    for form in ("perfetto", "otlp-json", "parquet"):
        assert export(path, "--format", form, "-o", tmp_path / form) == 0

    exported.Reader().parse((tmp_path / "perfetto").read_bytes())
    assert (tmp_path / "otlp-json").read_bytes() == b""


def test_a_missing_package_is_named_with_what_to_install(store: Path) -> None:
    script = (
        "import sys; sys.modules['perfetto'] = None\nfrom kvtrace import cli\n"
        f"sys.exit(cli.main(['export', {str(store)!r}, '--format', 'perfetto', '-o', '-']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "pip install 'kvtrace[perfetto]'" in done.stderr


# Size --------------------------------------------------------------------------------------------------------

_REQUESTS = 10_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of many requests of 20 segments each, made in SQL."""
    path = tmp_path_factory.mktemp("large") / "large.duckdb"
    path.write_bytes(empty_store())
    with Store.open(path, "write") as opened:
        opened.execute(
            "INSERT INTO request BY NAME SELECT i AS request_key, 'kvt-' || i AS request_id, 0 AS attempt, "
            "'push' AS mode, 'complete' AS verdict, 'router' AS scope, 'p' AS prefill_engine, 'd' AS decode_engine, "
            "1000000000000000000 + i * 1000000 AS start_ns, start_ns + 20000000 AS first_token_ns, "
            "start_ns + 50000000 AS end_ns, 20000000 AS ttft_ns FROM range($n) AS t(i)",
            {"n": _REQUESTS},
        )
        opened.execute(
            "INSERT INTO segment BY NAME SELECT request_key, p AS position, 'wire' AS cause, 'transfer' AS class, "
            "'transfer' AS \"where\", start_ns + p * 1000000 AS start_ns, start_ns + (p + 1) * 1000000 AS end_ns "
            "FROM request, range(20) AS t(p)"
        )
    return path


@pytest.mark.parametrize("form", ["perfetto", "otlp-json", "parquet"])
def test_memory_does_not_grow_with_the_store(large: Path, tmp_path: Path, form: str) -> None:
    """Ten times as many requests take about as much memory."""
    peak = {}
    for count in (_REQUESTS // 10, _REQUESTS):
        end = (dt.datetime(2001, 9, 9, 1, 46, 40) + dt.timedelta(milliseconds=count)).isoformat()  # noqa: DTZ001 -- UTC
        target = tmp_path / f"{form}-{count}"
        script = (
            "import resource, sys\nfrom kvtrace import cli\n"
            f"wanted = ['--format', {form!r}, '-o', {str(target)!r}, '--to', {end!r}]\n"
            f"code = cli.main(['export', {str(large)!r}, *wanted])\n"
            "print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        code, peak_kib = map(int, done.stdout.split())
        assert code == 0, done.stderr
        peak[count] = peak_kib

    small, whole = peak.values()
    assert whole < 1.1 * small + 20_000, peak
