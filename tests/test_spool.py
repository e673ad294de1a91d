"""The spool's limits: budget, full and vanished folders, room left to others. Loss is counted, never waited for."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import emit, spool, stages
from tests import spooled
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ENQUEUED = stages.PREFILL_ENQUEUED.code
FINISHED = stages.PREFILL_FINISHED.code


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "FIRST_BYTES", 64 * 1024)
    monkeypatch.setattr(spool, "RESERVE_BYTES_MAX", 64 * 1024)
    monkeypatch.setattr(spool, "ROTATE_BYTES", 0)
    monkeypatch.setattr(spool, "PRESSED_NS", 0)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def emit_many(tracer: emit.Emitter, count: int, start: int = 0, pause_every: int = 500) -> None:
    for number in range(start, start + count):
        tracer.emit(ENQUEUED, f"r{number // 25}", number)
        if number % pause_every == 0:
            time.sleep(0.001)


def emit_in_parts(tracer: emit.Emitter, count: int) -> None:
    """Emit so many, with a new window whenever one is used up, however seldom the spool's thread gets a processor."""
    for start in range(0, count, 500):
        emit_many(tracer, 500, start)
        tracer.flush()


def emit_once_there_is_room(tracer: emit.Emitter, request: str) -> None:
    """Emit one event that is not dropped: the spool's thread looks for room every RETRY_S."""

    def is_kept() -> bool:
        before = tracer.dropped().get(ENQUEUED)
        tracer.emit(ENQUEUED, request, 1)
        return tracer.dropped().get(ENQUEUED) == before

    until(is_kept, what=f"there is room for {request}")


def test_budget_spent_drops_and_counts_by_stage(small_windows: None, tmp_path: Path) -> None:
    tracer = emit.Emitter(tmp_path, budget_bytes=256 * 1024)
    emit_in_parts(tracer, 10_000)
    for _ in range(100):
        tracer.emit(FINISHED, "r0")
    tracer.flush()

    found = spooled.read(tmp_path)
    kept = [event.numbers[0] for event in found.of(ENQUEUED)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 256 * 1024
    assert kept[:1000] == list(range(1000))
    assert len(kept) + found.dropped[ENQUEUED] == 10_000
    assert len(found.of(FINISHED)) + found.dropped[FINISHED] == 100
    tracer.close()


def test_room_comes_back_when_the_recorder_deletes_files(small_windows: None, tmp_path: Path) -> None:
    tracer = emit.Emitter(tmp_path, budget_bytes=256 * 1024)
    emit_in_parts(tracer, 10_000)
    for path in sorted(tmp_path.glob("*.kvt"))[:-1]:
        path.unlink()
    emit_once_there_is_room(tracer, "again")
    tracer.flush()

    found = spooled.read(tmp_path)
    assert found.of(ENQUEUED)[-1].request == "again"
    told = {event.numbers[0]: event.numbers[1] for event in found.of(stages.DROPPED.code)}
    assert told[ENQUEUED] == found.dropped[ENQUEUED] > 0, "the loss is told again where there is room"
    tracer.close()


def test_a_full_tmpfs_neither_kills_nor_raises(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvtrace"):
        tracer = emit.Emitter(tmpfs)
        emit_many(tracer, 40_000)
    found = spooled.read(tmpfs)

    assert len(found.of(ENQUEUED)) > 5_000
    assert len(found.of(ENQUEUED)) + tracer.dropped()[ENQUEUED] == 40_000
    assert tracer.enabled
    assert len(caplog.records) == 1, "one line, however many events are lost"
    tracer.close()


def test_the_last_part_of_a_file_system_is_left_to_others(tmpfs: Path) -> None:
    tracer = emit.Emitter(tmpfs)
    emit_many(tracer, 40_000)
    room = os.statvfs(tmpfs)
    tracer.close()

    assert room.f_bavail * room.f_frsize >= 1024 * 1024 // spool.FLOOR_SHARE


def test_room_filled_by_others_and_freed_again(tmpfs: Path) -> None:
    tracer = emit.Emitter(tmpfs)
    with contextlib.suppress(OSError), (tmpfs / "other").open("wb", buffering=0) as other:
        while other.write(bytes(4096)):
            pass
    emit_many(tracer, 20_000)
    assert tracer.dropped()[ENQUEUED] > 0

    (tmpfs / "other").unlink()
    for path in sorted(tmpfs.glob("*.kvt"))[:-1]:
        path.unlink()
    emit_once_there_is_room(tracer, "again")

    assert spooled.read(tmpfs).of(ENQUEUED)[-1].request == "again"
    tracer.close()


def test_space_that_is_refused_only_when_reserved(
    small_windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota is no part of what the file system says is free."""
    tracer = emit.Emitter(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    emit_many(tracer, 5_000)
    monkeypatch.undo()

    assert tracer.dropped()[ENQUEUED] > 0
    assert len(spooled.read(tmp_path).of(ENQUEUED)) + tracer.dropped()[ENQUEUED] == 5_000
    tracer.close()  # until then its thread tries again, and has a file half made for a moment
    assert not list(tmp_path.glob(".*")), "nothing half-made is left"


def test_a_removed_folder_is_made_again_and_what_it_held_counts_as_lost(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    tracer = emit.Emitter(folder)
    tracer.fact("kind", "core")
    emit_many(tracer, 100)
    shutil.rmtree(folder)
    emit_many(tracer, 50, start=100)
    tracer.flush()
    emit_many(tracer, 10, start=150)

    found = spooled.read(folder)
    assert [event.numbers[0] for event in found.of(ENQUEUED)] == list(range(150, 160))
    assert found.dropped[ENQUEUED] == 150
    assert found.facts == {"kind": "core"}
    tracer.close()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Return a folder as a recorder makes it for itself."""
    folder = tmp_path / f"{spool.PRIVATE_PREFIX}x7"
    folder.mkdir()
    return folder


def test_the_folder_of_a_recording_that_is_over_is_not_made_again(
    private: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.rmdir()
    monkeypatch.setenv(emit.SPOOL_VARIABLE, str(private))
    tracer = emit._from_environment()
    emit_many(tracer, 10)

    assert not tracer.enabled
    assert not private.exists()
    (said,) = caplog.messages
    assert said.startswith(f"kvtrace is off in process {os.getpid()}: ")
    assert "the recording that it was made for is over" in said


def test_tracing_ends_with_the_recording_whose_folder_is_taken_away(
    private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It made the folder again and filled shared memory, up to its budget, for nobody."""
    tracer = emit.Emitter(private)
    emit_many(tracer, 100)
    shutil.rmtree(private)
    tracer.flush()
    emit_many(tracer, 50)

    assert not tracer.enabled
    assert not private.exists()
    (said,) = caplog.messages
    assert said.startswith(f"kvtrace switched itself off in process {os.getpid()}, serving goes on: ")
    tracer.close()


def test_a_child_that_is_forked_behind_a_recording_does_not_trace(private: Path) -> None:
    script = """
import os, pathlib, shutil, sys
shutil.rmtree(os.environ["KVTRACE_SPOOL"])
if not (child := os.fork()):
    tracer.emit(50, "r")
    tracer.emit(50, "r")
    os._exit(int(tracer.enabled))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
    assert spooled.run(script, private) == "0\n"
    assert not private.exists()


def test_a_folder_that_cannot_be_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    tracer = emit.Emitter(folder)
    emit_many(tracer, 100)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    tracer.flush()
    emit_many(tracer, 50)
    assert tracer.dropped()[ENQUEUED] == 150

    folder.unlink()
    emit_once_there_is_room(tracer, "again")

    assert [event.request for event in spooled.read(folder).of(ENQUEUED)] == ["again"]
    tracer.close()


def test_used_files_are_sealed_and_unmapped(small_windows: None, tmp_path: Path) -> None:
    tracer = emit.Emitter(tmp_path)
    emit_in_parts(tracer, 10_000)
    tracer.flush()

    mapped = Counter(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    )
    files = sorted(str(path) for path in tmp_path.glob("*.kvt"))
    assert len(files) > 5
    assert set(mapped) == set(files[-2:]), "the one in use and the one in reserve"
    tracer.close()


def test_windows_grow_while_they_fill_fast_and_shrink_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "RESERVE_BYTES_MAX", spool.FIRST_BYTES)
    monkeypatch.setattr(spool, "PRESSED_NS", 60_000_000_000)
    made = spool.Spool(tmp_path, spool.BUDGET_BYTES)
    ends = []
    for _ in range(6):
        made.grow()
        ends.append(made._segment.end)
    monkeypatch.setattr(spool, "PRESSED_NS", 0)  # any time that has gone by is a long one
    made.grow()

    unit = spool.FIRST_BYTES
    assert [end // unit for end in ends] == [1, 2, 4, 8, 16, 32]
    assert made._segment.end == unit, "a new file, with a window of the usual size"


def test_the_host_id_is_short_and_stable() -> None:
    assert spool.host_id("gpu-1") == spool.host_id("gpu-1")
    assert spool.host_id("gpu-1") != spool.host_id("gpu-2")
    assert len(spool.host_id("gpu-1")) == 12


def test_a_window_set_back_by_a_slow_thread_loses_nothing(small_windows: None, tmp_path: Path) -> None:
    tracer = emit.Emitter(tmp_path)
    first = tracer._window
    emit_many(tracer, 10_000)
    tracer.flush()
    tracer._window = first
    tracer.emit(ENQUEUED, "after", 10_000)
    tracer._window = first
    tracer.flush()
    assert tracer._window[3].segment in tracer._segments

    found = spooled.read(tmp_path)
    assert len(found.of(ENQUEUED)) + found.dropped.get(ENQUEUED, 0) == 10_001
    assert found.of(ENQUEUED)[-1].request == "after"
    tracer.close()


def test_a_window_set_back_to_a_removed_file_is_left_within_a_second(tmp_path: Path) -> None:
    tracer = emit.Emitter(tmp_path / "spool")
    first = tracer._window
    shutil.rmtree(tmp_path / "spool")
    tracer.flush()
    tracer._window = first
    tracer.flush()
    tracer.emit(ENQUEUED, "after")

    assert [event.request for event in spooled.read(tmp_path / "spool").of(ENQUEUED)] == ["after"]
    tracer.close()
