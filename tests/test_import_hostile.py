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

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace import cli
from kvtrace.importers import formats, source
from tests import import_records as records
from tests.import_records import run
from tests.trace import START_NS, push

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


@functools.cache
def recorded(name: str) -> bytes:
    """Return the bytes of an analysed store of one hand-off; making it takes long compared with an import."""
    with tempfile.TemporaryDirectory() as folder:
        return records.recorded(Path(folder) / "run.duckdb", push(name=name)).read_bytes()


def attempt(content: bytes, *, forced: str | None = None) -> str:
    """Import a file into a store of the request r1; check what always holds and return what was said."""
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
    return said


def changed(line: str, path: list[str], value: Any) -> str:
    """Return a JSON line with one field replaced."""
    document = json.loads(line)
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(document)


@settings(max_examples=20)
@given(client_id=IDS, sent_ms=TIMES, ttft_ms=TIMES, done_ms=TIMES, copies=st.integers(1, 3))
def test_clients_of_any_name_and_time(
    client_id: str, sent_ms: float, ttft_ms: float, done_ms: float, copies: int
) -> None:
    line = records.aiperf("r1", 0, 1, 2)
    line = changed(line, ["metadata", "x_request_id"], client_id)
    line = changed(line, ["metrics", "time_to_first_token", "value"], ttft_ms)
    for field, value in (("request_start_ns", sent_ms), ("request_end_ns", done_ms)):
        is_plain = abs(value) < 1e6
        line = changed(line, ["metadata", field], START_NS + int(value * 1e6) if is_plain else value)

    attempt(f"{line}\n".encode() * copies)


@settings(max_examples=20)
@given(
    field=st.sampled_from([
        ["metadata"], ["metrics"], ["error"], ["metadata", "request_start_ns"], ["metadata", "x_request_id"],
        ["metadata", "was_cancelled"], ["metrics", "time_to_first_token"], ["metrics", "output_sequence_length"],
    ]),
    value=JUNK,
)  # fmt: skip
def test_any_value_in_any_field_of_aiperf(field: list[str], value: object) -> None:
    line = changed(records.aiperf("x", 0, 50, 90), field, value)

    attempt(f"{records.aiperf('y', 0, 50, 90)}\n{line}\n".encode())


@settings(max_examples=15)
@given(field=st.sampled_from(sorted(json.loads(records.dynamo("a", 0))["request"])), value=JUNK)
def test_any_value_in_any_field_of_dynamo(field: str, value: object) -> None:
    line = changed(records.dynamo("a", 0), ["request", field], value)

    attempt(f"{line}\n".encode())


@settings(max_examples=15)
@given(
    field=st.sampled_from([
        "schema", "event", "wall_ns", "monotonic_ns", "connector", "transfer_mode", "role", "request_id_hash",
        "request_group_id_hash", "remote_request_id_hash", "block_count",
    ]),
    value=JUNK,
)  # fmt: skip
def test_any_value_in_any_field_of_a_lifecycle_line(field: str, value: object) -> None:
    record = changed(records.lifecycle("transfer_staged", "producer", 1, "cmpl-x-0-aaaaaaaa"), [field], value)

    attempt("\n".join([*records.handoff("y"), records.logged(record)]).encode())


@settings(max_examples=15)
@given(
    field=st.sampled_from([
        "start_times", "ttfts", "itls", "latencies", "input_lens", "output_lens", "errors", "request_ids",
        "request_id_prefix", "date",
    ]),
    value=JUNK,
)  # fmt: skip
def test_any_value_in_any_field_of_bench(field: str, value: object) -> None:
    document = records.bench((1.0, 0.1, 0.5), (2.0, 0.1, 0.5))

    attempt(json.dumps(document | {field: value}).encode())


SAMPLES: dict[str, Callable[[], str]] = {
    "vllm-lifecycle": lambda: "\n".join(records.handoff("x")),
    "aiperf": lambda: "\n".join(records.aiperf(f"x{number}", number, 50, 90) for number in range(3)),
    "vllm-bench": lambda: json.dumps(records.bench((1.0, 0.1, 0.5), (2.0, 0.1, 0.5)), indent=1),
    "dynamo": lambda: "\n".join(records.dynamo(f"x{number}", number) for number in range(3)),
}


@settings(max_examples=25)
@given(name=st.sampled_from(formats.FORMATS), part=st.floats(0, 1), forced=st.booleans())
def test_a_file_cut_anywhere_is_whole_records_or_an_error_with_its_line(name: str, part: float, forced: bool) -> None:
    whole = SAMPLES[name]().encode()
    cut = whole[: int(part * len(whole))]

    said = attempt(cut, forced=name if forced else None)

    if "the record is cut short" in said:
        last = len(cut.rstrip().splitlines())
        assert f"line {last}: " in said


@settings(max_examples=25)
@given(
    name=st.sampled_from(formats.FORMATS),
    at=st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4),
)
def test_bytes_written_over_a_file(name: str, at: list[tuple[float, bytes]]) -> None:
    content = bytearray(SAMPLES[name]().encode())
    for part, scribble in at:
        place = int(part * len(content))
        content[place : place + len(scribble)] = scribble

    attempt(bytes(content), forced=name)


@settings(max_examples=15)
@given(content=st.binary(max_size=200), name=st.sampled_from([None, *formats.FORMATS]))
def test_anything_at_all(content: bytes, name: str | None) -> None:
    attempt(content, forced=name)


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
