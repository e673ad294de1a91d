"""The reader while others write: nothing torn, invented or lost, and fast enough."""

from __future__ import annotations

import shutil
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING

from kvtrace import emit, stages
from kvtrace.segments import SegmentFile
from tests import spooled

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


ENQUEUED = stages.PREFILL_ENQUEUED.code

HAMMER = f"""
import threading, time, zlib
def work(thread: int):
    for n in range({{count}}):
        request, ref = f"request {{{{thread}}}}-{{{{n // 25}}}}", f"ref {{{{n % 13}}}}"
        check = zlib.crc32(f"{{{{request}}}} {{{{ref}}}} {{{{n}}}}".encode())
        tracer.emit({ENQUEUED} + thread, request, n, thread, check, -n, ref)
        if n % 200 == 0: time.sleep(0.0005)
        if n % 1000 == 0: tracer.flush()  # else, where the spool's thread gets no processor, some are dropped
threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tracer.flush()
"""


def follow(
    folder: Path, process: subprocess.Popen[str], killed_at: int | None = None
) -> tuple[list[spooled.Event], dict[int, int]]:
    """Tail a folder until its writer has ended and every file is sealed; return all events and what was dropped.

    The writer is killed once each of its threads has been seen to write `killed_at` events.
    """
    files, finished, events, dropped = {}, set(), [], {}
    while True:
        ended = process.poll() is not None
        for path in sorted(folder.glob("*.kvt")):
            if path not in files:
                files[path] = SegmentFile.open(path)
            if path in finished:
                continue
            file = files[path]
            batch = file.poll()
            found = spooled.events_of(batch)
            events += found
            assert batch.damaged == 0
            for code, count in batch.dropped.items():
                dropped[code] = max(count, dropped.get(code, 0))
            if file.sealed and not found:
                finished.add(path)
                path.unlink()
        if killed_at is not None:
            written = Counter(event.code for event in events)
            if all(written[ENQUEUED + thread] >= killed_at for thread in range(4)):
                process.kill()
        if ended and len(finished) == len(files):
            return events, dropped


def test_a_reader_beside_four_writing_threads_sees_nothing_torn_invented_or_lost(tmp_path: Path) -> None:
    count = 50_000
    process = spooled.start(HAMMER.format(count=count), tmp_path)
    events, dropped = follow(tmp_path, process)
    _, err = process.communicate()

    assert process.returncode == 0, err
    seen = [[], [], [], []]
    for event in events:
        if event.code < ENQUEUED or event.code > ENQUEUED + 3 or event.code == stages.DROPPED.code:
            continue
        number, thread, check, negative = event.numbers
        text = f"{event.request} {event.ref} {number}"
        assert check == zlib.crc32(text.encode())
        assert (event.code, negative) == (ENQUEUED + thread, -number)
        assert event.request == f"request {thread}-{number // 25}"
        seen[thread].append(number)
    assert dropped == {}
    assert all(sorted(numbers) == list(range(count)) for numbers in seen)


def test_a_killed_writer_beside_a_reader_loses_nothing_that_came_before(tmp_path: Path) -> None:
    process = spooled.start(HAMMER.format(count=10**9), tmp_path)
    events, dropped = follow(tmp_path, process, killed_at=500)
    process.communicate()

    for thread in range(4):
        numbers = sorted(event.numbers[0] for event in events if event.code == ENQUEUED + thread)
        assert len(numbers) >= 500
        assert numbers == list(range(len(numbers)))
    assert dropped == {}


def test_copies_made_while_threads_write_hold_no_torn_record(tmp_path: Path) -> None:
    """A copy is read ascending by whoever makes it: a record is one aligned cache line, so it is copied whole."""
    live, copies = tmp_path / "live", tmp_path / "copies"
    copies.mkdir()
    live.mkdir()
    process = spooled.start(HAMMER.format(count=20_000).replace("if n % 200 == 0: time.sleep(0.0005)", ""), live)
    torn = made = 0
    while process.poll() is None:
        for path in sorted(live.glob("*.kvt")):
            copy = copies / path.name
            shutil.copyfile(path, copy)
            made += 1
            batch = SegmentFile.open(copy).poll()
            for event in spooled.events_of(batch)[-64:]:
                if ENQUEUED <= event.code <= ENQUEUED + 3:
                    torn += event.numbers[2] != zlib.crc32(f"{event.request} {event.ref} {event.numbers[0]}".encode())
    process.communicate()

    assert made > 0
    assert torn == 0


def test_reading_is_fast_enough_for_the_recorder(tmp_path: Path) -> None:
    """Processor time, since others share the machine; a tenth of what a quiet machine reaches."""
    tracer = emit.Emitter(tmp_path)
    for number in range(100_000):
        tracer.emit(ENQUEUED, f"cmpl-kvt-{number // 25:032x}-0-00000000", number)
        if number % 5000 == 0:
            time.sleep(0.002)
    tracer.close()
    began_s = time.process_time()
    found = sum(len(SegmentFile.open(path).poll().records) for path in tmp_path.glob("*.kvt"))
    took_s = time.process_time() - began_s

    assert found > 50_000
    assert found / took_s > 500_000
