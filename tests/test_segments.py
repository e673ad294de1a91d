"""The reader: whole records only, each once, whatever state the file is in."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace import clock, emit, segments, stages, wire
from kvtrace.errors import SpoolError
from kvtrace.segments import SegmentFile
from tests import spooled
from tests.waiting import until

if TYPE_CHECKING:
    from kvtrace.segments import Batch

ENQUEUED = stages.PREFILL_ENQUEUED.code


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """One file: 300 events with a new request id every 25, of a process that is gone by another host's reckoning."""
    tracer = emit.Emitter(tmp_path / "spool")
    tracer.fact("kind", "core")
    for number in range(300):
        tracer.emit(
            ENQUEUED, f"cmpl-kvt-{number // 25:032x}-0-00000000", number, ref=f"ref {number % 7}", t_ns=1 + number
        )
    tracer.close()
    return min((tmp_path / "spool").glob("*.kvt"))


def place(data: bytes | bytearray, number: int) -> int:
    """Return the offset of the event with this number."""
    offsets = range(4096, len(data) - 63, 64)
    return next(o for o in offsets if wire.RECORD.unpack_from(data, o)[1:8:6] == (number, ENQUEUED))


def numbers(batch: Batch) -> list[int]:
    return [event.numbers[0] for event in spooled.events_of(batch) if event.code == ENQUEUED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for files that one example after another writes anew."""
    return tmp_path_factory.mktemp("segments")


@functools.cache
def file_of(events: int, per_request: int, *, with_refs: bool = False) -> bytes:
    """Return a file of numbered events with a new request id every few, and with ever longer strings."""
    with tempfile.TemporaryDirectory() as spool:
        tracer = emit.Emitter(Path(spool))
        for number in range(events):
            ref = "x" * number if with_refs else ""
            tracer.emit(ENQUEUED, f"request {number // per_request}", number, ref=ref, t_ns=1 + number)
        tracer.close()
        return min(Path(spool).glob("*.kvt")).read_bytes()


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 400 * 64 + 4096))
def test_any_truncation_yields_the_whole_records_before_it(folder: Path, cut: int) -> None:
    path, whole = folder / "cut.kvt", file_of(100, 3, with_refs=True)
    path.write_bytes(whole[:cut])

    if cut < wire.HEADER_BYTES:
        with pytest.raises(SpoolError, match=r"cut\.kvt"):
            SegmentFile.open(path)
        return
    codes = [wire.RECORD.unpack_from(whole, offset)[7] for offset in range(4096, cut - 63, 64)]
    events = spooled.events_of(SegmentFile.open(path).poll())
    assert [e.numbers[0] for e in events if e.code == ENQUEUED] == list(range(codes.count(ENQUEUED)))
    assert all(e.request == f"request {e.numbers[0] // 3}" for e in events if e.code == ENQUEUED)
    assert all(e.ref == "x" * e.numbers[0] for e in events if e.code == ENQUEUED)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=6), st.data())
def test_it_can_be_resumed_anywhere(folder: Path, cuts: list[int], data: Any) -> None:
    """Stop after any number of bytes, open again at the position noted: every record comes once, in order."""
    path, whole = folder / "grows.kvt", file_of(300, 3)
    seen, position = [], (0, ())
    for cut in [*sorted(cuts), 1000]:
        path.write_bytes(whole[: 4096 + cut * 64 + data.draw(st.integers(0, 63))])
        file = SegmentFile.open(path, *position)
        seen += numbers(file.poll())
        position = (file.consumed, file.holes)
        file.close()

    assert seen == list(range(300))


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 1000, os.urandom(9000), b"kvtrace\n", b"kvtrace\n" + bytes(9000)]
)
def test_a_foreign_file_is_named_with_the_reason(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.kvt"
    path.write_bytes(content)

    with pytest.raises(SpoolError, match=r"foreign\.kvt: "):
        SegmentFile.open(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.kvt", tmp_path):
        with pytest.raises(SpoolError, match=str(path)):
            SegmentFile.open(path)


def test_a_pipe_is_named_and_its_writer_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe.kvt")

    with pytest.raises(SpoolError, match="is no regular file"):
        SegmentFile.open(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=64, max_size=64 * 50), st.booleans())
def test_garbage_behind_a_good_header_invents_nothing(folder: Path, garbage: bytes, commits: bool) -> None:
    """Even with commit words that look right, a record must make sense to be returned."""
    path = folder / "garbage.kvt"
    header = wire.SegmentHeader("s", 0, 1000, 1, 1, 1, 1, 1, 1, 1, 1, "h", "h", "b", "d", wire.vocabulary_print())
    body = bytearray(garbage[: len(garbage) // 64 * 64])
    if commits:
        for offset in range(0, len(body), 64):
            wire.COUNTER.pack_into(body, offset + 56, 4096 + offset)
    path.write_bytes(wire.pack_header(header) + body)

    for event in spooled.events_of(SegmentFile.open(path).poll()):
        assert event.code in stages.BY_CODE
        assert event.t_ns > 0


@settings(max_examples=100, deadline=None)
@given(st.integers(4096, 4096 + 64 * 340), st.integers(1, 255))
def test_one_flipped_byte_never_breaks_the_reader(folder: Path, offset: int, flip: int) -> None:
    path = folder / "flipped.kvt"
    data = bytearray(file_of(300, 25))
    data[offset] ^= flip
    path.write_bytes(data)

    batch = SegmentFile.open(path).poll()
    assert 300 - 25 <= len(numbers(batch)) <= 301


def test_a_hole_holds_nothing_up_and_is_filled_later(written: Path) -> None:
    data = bytearray(written.read_bytes())
    offset = place(data, 200)
    whole = bytes(data[offset : offset + 64])
    data[offset : offset + 64] = bytes(64)
    wire.COUNTER.pack_into(data, wire.SEALED_OFFSET, 0)
    written.write_bytes(data)
    file = SegmentFile.open(written)
    before = numbers(file.poll())
    assert file.holes == ((offset - 4096) // 64,)
    assert not file.sealed

    with written.open("r+b") as out:
        out.seek(offset)
        out.write(whole)
    after = numbers(file.poll())

    assert len(before) == 299
    assert sorted(before + after) == list(range(300))
    assert file.holes == ()


def test_a_hole_counts_as_lost_once_the_file_is_left(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(written.read_bytes())
    offset = place(data, 200)
    data[offset : offset + 64] = bytes(64)
    written.write_bytes(data)
    file = SegmentFile.open(written)
    file.poll()
    assert not file.sealed, "its thread may still fill it"

    assert file.holes == ((offset - 4096) // 64,)
    monkeypatch.setattr(segments, "GRACE_NS", 0)
    batch = file.poll()
    assert file.sealed
    assert batch.lost == 1
    assert file.holes == ()


def test_a_gap_longer_than_a_block_is_passed_over_in_a_file_that_was_left(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "BLOCK_RECORDS", 16)
    data = bytearray(written.read_bytes())
    begin, end = place(data, 101), place(data, 199) + 64
    data[begin:end] = bytes(end - begin)
    written.write_bytes(data)
    file = SegmentFile.open(written)
    found = numbers(file.poll())

    assert found == [*range(101), *range(200, 300)]
    assert len(file.holes) == (end - begin) // 64


def test_stages_of_a_newer_vocabulary_are_counted_by_code(written: Path) -> None:
    data = bytearray(written.read_bytes())
    header = replace(wire.unpack_header(bytes(data), "x"), vocabulary="f" * 16)
    data[:1024] = wire.pack_header(header)[:1024]
    code = place(data, 200) + 48
    data[code : code + 2] = (9999).to_bytes(2, "little")
    written.write_bytes(data)
    batch = SegmentFile.open(written).poll()

    assert batch.unknown == {9999: 1}
    assert len(numbers(batch)) == 299
    assert batch.damaged == 0


def test_a_file_is_sealed_when_its_writer_is_dead(tmp_path: Path) -> None:
    process = spooled.start(f"tracer.emit({ENQUEUED}, 'r', 1)\nprint(flush=True)\ninput()", tmp_path)
    process.stdout.readline()
    files = [SegmentFile.open(path) for path in sorted(tmp_path.glob("*.kvt"))]
    for file in files:
        file.poll()
    assert [file.sealed for file in files] == [False, False]

    process.send_signal(signal.SIGKILL)

    def are_sealed() -> bool:
        assert all(len(file.poll().records) < 5 for file in files)
        return all(file.sealed for file in files)

    until(are_sealed)
    process.communicate()


def test_a_copied_file_is_never_sealed_by_a_pid(written: Path, tmp_path: Path) -> None:
    """On another host the pid says nothing: the mark does, or the existence of the file after the next."""
    data = bytearray(written.read_bytes())
    header = replace(wire.unpack_header(bytes(data), "x"), boot_id="another", series="s")
    wire.COUNTER.pack_into(data, wire.SEALED_OFFSET, 0)
    data[:1024] = wire.pack_header(header)[:960] + data[960:1024]
    copied = tmp_path / wire.segment_name("s", 0)
    copied.write_bytes(data)
    file = SegmentFile.open(copied)
    file.poll()
    file.poll()
    assert not file.sealed

    (tmp_path / wire.segment_name("s", 1)).write_bytes(b"")
    file.poll()
    assert not file.sealed, "the next one is only in reserve"

    (tmp_path / wire.segment_name("s", 2)).write_bytes(b"")
    file.poll()
    assert file.sealed


def test_a_removed_file_can_be_read_to_its_end(written: Path) -> None:
    file = SegmentFile.open(written)
    written.unlink()

    assert numbers(file.poll()) == list(range(300))


def test_what_else_runs_here_has_no_part_in_it(written: Path) -> None:
    """A writer of this boot that is alive keeps its file open; the same pid started at another time does not."""
    data = bytearray(written.read_bytes())
    wire.COUNTER.pack_into(data, wire.SEALED_OFFSET, 0)
    written.write_bytes(data)
    file = SegmentFile.open(written)
    file.poll()
    assert not file.sealed

    header = replace(file.header, start_ticks=file.header.start_ticks + 1)
    data[:1024] = wire.pack_header(header)[:960] + data[960:1024]
    written.write_bytes(data)
    file = SegmentFile.open(written)
    file.poll()
    assert file.sealed
    assert clock.process_start_ticks(header.pid) == header.start_ticks - 1
