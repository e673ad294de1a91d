"""`kvtrace export`: the files' own schemas and what stands in them."""

from __future__ import annotations

import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from kvtrace import cli, schema, stages
from kvtrace.exporters import otlp_json, perfetto, source
from kvtrace.exporters.lanes import Lanes
from kvtrace.schema.kept import WINDOWS_NS
from kvtrace.store import Store
from tests import exported, sample_store
from tests.otlp_receiver import values
from tests.trace import MS, START_NS, Trace, pull, push

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


def test_a_transfer_that_could_not_be_made_has_its_place_in_time(tmp_path: Path) -> None:
    """The agent refuses to make it at 39 ms, so it has neither descriptors nor a post."""
    trace = pull().without("transfer.prepared", "transfer.post_started", "transfer.post_ended", "transfer.done")
    trace.at(39, stages.TRANSFER_FAILED, "cmpl-r1-0-bbbbbbbb", 7, ref="nixlBackendError: no memory")
    run = exported.write(tmp_path / "run.duckdb", trace)
    with Store.open(run) as opened:
        ((told,),) = source.batches(opened, source.Choice())
        made = spans(told, otlp_json_facts(opened))

    (transfer,) = (span for span in made if span.name == "kvtrace.transfer")
    assert (transfer.start_ns - START_NS, transfer.end_ns - START_NS) == (39 * MS, 39 * MS)
    assert transfer.error == "nixlBackendError: no memory"


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


def test_a_transfer_is_drawn_until_the_side_that_needs_the_kv_saw_its_end(drawn: exported.Read) -> None:
    """By push D reads the notification at 42 ms, and P polls at 43, which only frees its blocks."""
    ends = {one.notes["request_id"]: (one.end_ns - one.start_ns) / MS for one in drawn.all() if one.name == "transfer"}

    assert (ends["kvt-push"], ends["kvt-pull"]) == (6, 4)


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


def test_engines_are_drawn_while_the_requests_chosen_were_under_way(tmp_path: Path) -> None:
    """Days between two of them are passed over: neither looked through nor drawn, whatever went on."""
    day_ms, idle = 86_400_000.0, Trace()
    idle.step(2, 7, (500, 501, 502, 503, 504))
    path = exported.write(
        tmp_path / "run.duckdb", push(name="kvt-a"), idle.shifted(0, day_ms / 2), pull("kvt-b"), apart_ms=day_ms
    )
    out, begin_s = io.BytesIO(), time.monotonic()
    with Store.open(path) as opened:
        assert perfetto.write(opened, source.Choice(), out) == 2
        assert source.stretches(opened, source.Choice(), 0) == [
            (START_NS, START_NS + 95 * MS), (START_NS + int(2 * day_ms) * MS, START_NS + int(2 * day_ms + 95) * MS),
        ]  # fmt: skip
    read = exported.Reader().parse(out.getvalue())

    steps = read.slices["prefill engine-p", "core: steps"]
    assert [(one.start_ns - START_NS) // MS for one in steps] == [4, 31, 2 * day_ms + 4]
    assert time.monotonic() - begin_s < 60


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


@pytest.mark.parametrize(
    ("chosen", "counts", "told"),
    [
        ([], [2, 2], ""),
        (["--from", "2023-11-14T22:13:30"], [1, 1], "so they hold the windows that lie wholly in that time"),
        (["--requests", "r1"], [0, 0], "so they are empty"),
    ],
)
def test_what_counts_windows_of_time_keeps_whole_ones_and_says_so(
    chosen: list[str], counts: list[int], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two windows of 30 s, of which the first lies before the time asked for."""
    sample = sample_store.Sample()
    for number in range(2):
        sample.add(f"r{number}", start_ms=30_000 * number)
    run = sample.write(tmp_path / "run.duckdb")
    fine_ns = WINDOWS_NS[0]
    with Store.open(run, "write") as store:
        for number in range(2):
            from_ns = (sample_store.START_NS // fine_ns + number) * fine_ns
            store.append_rows("occurrence", [{"from_ns": from_ns, "process": 1, "stage": "decode.ready", "events": 1}])

    assert export(run, "--format", "parquet", "-o", tmp_path / "t", *chosen) == 0

    said = capsys.readouterr().err
    read = {name: pq.read_table(tmp_path / "t" / f"{name}.parquet") for name in ("occurrence", "tally")}
    assert [len(table.column("from_ns").unique()) for table in read.values()] == counts
    assert told in said
    assert ("tables occurrence and tally" in said) is bool(told)


def test_a_folder_with_a_hostile_name_is_written_to_and_no_other(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's; DROP TABLE x"
    assert export(store, "--format", "parquet", "-o", folder) == 0

    assert len(list(folder.glob("*.parquet"))) == len(schema.TABLES)
