"""Files that nobody meant well: never a traceback, never half an import, never a share that does not add up."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace import cli
from kvtrace.errors import SourceError
from kvtrace.importers import formats, intake, source
from kvtrace.importers.identity import Known
from kvtrace.importers.source import open_source
from kvtrace.model import Event, Process
from tests import import_records as records
from tests.import_records import run
from tests.trace import PROCESSES, START_NS, check_tiles, push

Given = tuple[bytes, str | None]
IDS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", " ", "r1", "x" * 10_000, "\x1b[2J\r\n\x00", "\u202e\ud800", "0123456789abcdef-01234567", "#", "-"]
    ),
)
TIMES = st.one_of(
    st.floats(-10, 500),
    st.sampled_from([float("nan"), float("inf"), -1e300, 1e300, 0.0, 1e-9, 10**18]),
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
EVENTS = pa.schema({
    "process": pa.int32(), "stage": pa.string(), "t_ns": pa.int64(), "request": pa.string(), "ref": pa.string(),
    **dict.fromkeys("abcd", pa.int64()),
})  # fmt: skip


@functools.cache
def recorded(name: str) -> bytes:
    """Return the bytes of an analysed store of one hand-off; making it takes long compared with an import."""
    with tempfile.TemporaryDirectory() as folder:
        return records.recorded(Path(folder) / "run.duckdb", push(name=name)).read_bytes()


def attempt(content: bytes, forced: str | None) -> None:
    """Import a file into a store of the request r1 and check what always holds."""
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(errors):
        store, file = Path(name) / "run.duckdb", Path(name) / "file"
        store.write_bytes(recorded("r1"))
        file.write_bytes(content)
        code = cli.main(["import", "--into", str(store), *(["--format", forced] if forced else []), str(file)])
        said = errors.getvalue()
        assert {path.name for path in file.parent.iterdir()} == {"run.duckdb", "file"}
        assert "error: unexpected" not in said
        if code:
            assert (code, said.count("\n")) == (1, 1)
            assert store.read_bytes() == recorded("r1")
        else:
            records.requests(store)


def placed(file: Path, content: bytes, forced: str | None) -> str:
    """Do what an import into a store of r1 does before and after the store has the rows, without a store.

    Return how the file was refused, "" where it was not.
    """
    file.write_bytes(content)
    known = Known()
    known.learn({event.request for event in push().events if event.request})
    try:
        files = intake._read([open_source(file)], intake._Before(known), None, forced)
    except SourceError as error:
        return str(error)
    trace, processes = push(), dict(PROCESSES)
    for one in files:
        numbers = {name: len(processes) + 1 + place for place, name in enumerate(one.parts)}
        rows = [intake._event(point, numbers[point.part]) for point in intake._new_points(one, set())]
        if rows:
            pa.Table.from_pylist(rows, schema=EVENTS)
        trace.events += [Event(**row) for row in rows]
        for name, number in numbers.items():
            part = one.parts[name]
            domain = f"{one.source.digest}/{part.clock}"
            processes[number] = Process(number, part.facts.get("kind", ""), "", domain, imported=one.format)
    check_tiles(trace, processes)
    return ""


def changed(line: str, path: list[str], value: Any) -> str:
    """Return a JSON line with one field replaced."""
    document = json.loads(line)
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(document)


def clients(client_id: str, sent_ms: float, ttft_ms: float, done_ms: float, copies: int) -> Given:
    """Return records of clients of any name and time."""
    line = records.aiperf("r1", 0, 1, 2)
    line = changed(line, ["metadata", "x_request_id"], client_id)
    line = changed(line, ["metrics", "time_to_first_token", "value"], ttft_ms)
    for field, value in (("request_start_ns", sent_ms), ("request_end_ns", done_ms)):
        is_plain = abs(value) < 1e6
        line = changed(line, ["metadata", field], START_NS + int(value * 1e6) if is_plain else value)
    return f"{line}\n".encode() * copies, None


def aiperf(field: list[str], value: object) -> Given:
    line = changed(records.aiperf("x", 0, 50, 90), field, value)
    return f"{records.aiperf('y', 0, 50, 90)}\n{line}\n".encode(), None


def dynamo(field: str, value: object) -> Given:
    return f"{changed(records.dynamo('a', 0), ['request', field], value)}\n".encode(), None


def lifecycle(field: str, value: object) -> Given:
    record = changed(records.lifecycle("transfer_staged", "producer", 1, "cmpl-x-0-aaaaaaaa"), [field], value)
    return "\n".join([*records.handoff("y"), records.logged(record)]).encode(), None


def bench(field: str, value: object) -> Given:
    document = records.bench((1.0, 0.1, 0.5), (2.0, 0.1, 0.5))
    return json.dumps(document | {field: value}).encode(), None


SAMPLES: dict[str, Callable[[], str]] = {
    "vllm-lifecycle": lambda: "\n".join(records.handoff("x")),
    "aiperf": lambda: "\n".join(records.aiperf(f"x{number}", number, 50, 90) for number in range(3)),
    "vllm-bench": lambda: json.dumps(records.bench((1.0, 0.1, 0.5), (2.0, 0.1, 0.5)), indent=1),
    "dynamo": lambda: "\n".join(records.dynamo(f"x{number}", number) for number in range(3)),
}


def cut(name: str, part: float, *, forced: bool) -> Given:
    """Return a sample that ends anywhere."""
    whole = SAMPLES[name]().encode()
    return whole[: int(part * len(whole))], name if forced else None


def scribbled(name: str, at: list[tuple[float, bytes]]) -> Given:
    """Return a sample with bytes written over it."""
    content = bytearray(SAMPLES[name]().encode())
    for part, scribble in at:
        place = int(part * len(content))
        content[place : place + len(scribble)] = scribble
    return bytes(content), name


CUT = st.builds(cut, st.sampled_from(formats.FORMATS), st.floats(0, 1), forced=st.booleans())
HOSTILE: dict[str, st.SearchStrategy[Given]] = {
    "clients of any name and time": st.builds(clients, IDS, TIMES, TIMES, TIMES, st.integers(1, 3)),
    "any value in any field of aiperf": st.builds(
        aiperf,
        st.sampled_from([
            ["metadata"], ["metrics"], ["error"], ["metadata", "request_start_ns"], ["metadata", "x_request_id"],
            ["metadata", "was_cancelled"], ["metrics", "time_to_first_token"], ["metrics", "output_sequence_length"],
        ]),
        JUNK,
    ),
    "any value in any field of dynamo": st.builds(
        dynamo, st.sampled_from(sorted(json.loads(records.dynamo("a", 0))["request"])), JUNK
    ),
    "any value in any field of a lifecycle line": st.builds(
        lifecycle,
        st.sampled_from([
            "schema", "event", "wall_ns", "monotonic_ns", "connector", "transfer_mode", "role", "request_id_hash",
            "request_group_id_hash", "remote_request_id_hash", "block_count",
        ]),
        JUNK,
    ),
    "any value in any field of bench": st.builds(
        bench,
        st.sampled_from([
            "start_times", "ttfts", "itls", "latencies", "input_lens", "output_lens", "errors", "request_ids",
            "request_id_prefix", "date",
        ]),
        JUNK,
    ),
    "a file cut anywhere": CUT,
    "bytes written over a file": st.builds(
        scribbled,
        st.sampled_from(formats.FORMATS),
        st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4),
    ),
    "anything at all": st.tuples(st.binary(max_size=200), st.sampled_from([None, *formats.FORMATS])),
}  # fmt: skip
"""Contents of files, and the format that the user names or None."""


# An import into a store takes a quarter of a second, all that it does but for DuckDB's part a few milliseconds.
@pytest.mark.parametrize("what", [what for what in HOSTILE if "cut" not in what])
def test_whatever_a_file_says_is_placed_or_refused(what: str, tmp_path: Path) -> None:
    @settings(max_examples=60)
    @given(HOSTILE[what])
    def check(given: Given) -> None:
        assert "\n" not in placed(tmp_path / "file", *given)

    check()


@settings(max_examples=40)
@given(st.one_of(*HOSTILE.values()))
def test_an_import_is_whole_or_changes_nothing(given: Given) -> None:
    attempt(*given)


@settings(max_examples=60)
@given(CUT)
def test_a_file_cut_anywhere_is_whole_records_or_an_error_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, given: Given
) -> None:
    content, _ = given

    said = placed(tmp_path_factory.getbasetemp() / "cut", *given)

    if "the record is cut short" in said:
        assert f"line {len(content.rstrip().splitlines())}: " in said


@pytest.mark.parametrize("field", ["block_count", "monotonic_ns", "wall_ns"])
def test_a_number_longer_than_any_float_is_one_clear_line(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = records.lifecycle("registration_staged", "consumer", 10, "cmpl-r1-0-bbbbbbbb", **{field: 10**400})
    line = records.logged(record)

    code, said = run(capsys, "-o", tmp_path / "new.duckdb", records.write(tmp_path / "log.txt", line))

    assert code == 1
    assert "line 1: " in said
    assert "unexpected" not in said


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "LINE_BYTES_MAX", 1 << 20)
    file = tmp_path / "p.jsonl"
    file.write_text(records.aiperf("x", 0, 50, 90) + "\n" + '{"metadata": "' + "x" * (2 << 20))

    code, said = records.run(capsys, "-o", tmp_path / "run.duckdb", file)

    assert code == 1
    assert "p.jsonl: line 2: is longer than 1 MiB, so it is no record" in said
