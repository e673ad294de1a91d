"""Spool folders copied from other hosts: their own clock, each file once, completed when the copy is renewed."""

from __future__ import annotations

from pathlib import Path

from kvtrace import emit, wire
from kvtrace.collect import Recorder
from kvtrace.store import Store
from tests.recordings import STEP, numbers, record_once, write
from tests.waiting import until

MS = 1_000_000


def copy_from_another_host(spool: Path, folder: Path, wall_shift_ns: int) -> None:
    """Write what the first process in `spool` wrote as if another host, whose wall clock is ahead, had written it."""
    folder.mkdir()
    for path in spool.glob("*.kvt"):
        data = bytearray(path.read_bytes())
        header = wire.unpack_header(bytes(data[: wire.HEADER_BYTES]), path.name)
        values = {name: getattr(header, name) for name in header.__dataclass_fields__}
        values.update(
            series="elsewhere",
            host_id="fedcba987654",
            boot_id="another-boot",
            domain="another-boot/1",
            anchor_wall_ns=header.anchor_wall_ns + wall_shift_ns,
        )
        data[: wire.HEADER_BYTES] = wire.pack_header(wire.SegmentHeader(**values))
        wire.COUNTER.pack_into(data, wire.SEALED_OFFSET, 1)
        (folder / wire.segment_name("elsewhere", header.number)).write_bytes(data)


def test_a_copied_folder_has_its_own_clock_and_keeps_its_last_file(spool: Path, output: Path) -> None:
    """Each clock domain meets the others through its own wall anchor; whether a writer far away lives is unknown."""
    write(spool, 0, 10)
    copied = spool.with_name("copied")
    copy_from_another_host(spool, copied, wall_shift_ns=3_600_000 * MS)
    last = max(copied.iterdir()).name
    record_once(output, spool, copied)

    with Store.open(output) as store:
        rows = store.rows(
            "SELECT p.host = 'fedcba987654' AS far, min(t_ns) AS first_ns FROM event JOIN process AS p USING (process)"
            " WHERE stage = 'step.started' GROUP BY ALL ORDER BY ALL"
        )
    assert rows[1]["first_ns"] - rows[0]["first_ns"] == 3_600_000 * MS
    assert [path.name for path in copied.iterdir()] == [last]
    assert list(spool.iterdir()) == []


def test_the_same_file_in_two_folders_counts_once(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    copied = spool.with_name("copied")
    copied.mkdir()
    for path in spool.glob("*.kvt"):
        (copied / path.name).write_bytes(path.read_bytes())
    recorder = record_once(output, spool, copied)

    assert numbers(output) == list(range(10))
    assert [line for line in recorder.stats.messages if "holds the same records as" in line]


def test_a_copy_that_is_renewed_goes_on_where_it_was(spool: Path, output: Path) -> None:
    """A synchronising copy replaces a file by a longer one under the same name: only what is new is taken."""
    source = spool.with_name("source")
    writer = emit.Emitter(source)
    copied = spool
    copied.mkdir()
    recorder = Recorder(output, [copied], {}, publish_interval_s=0.1, analysis=None)

    def synchronise() -> None:
        for path in source.glob("*.kvt"):
            arriving = copied / f".{path.name}.part"
            arriving.write_bytes(path.read_bytes())
            arriving.rename(copied / path.name)

    with recorder:
        recorder.start()
        for first in (0, 10, 20):
            for i in range(first, first + 10):
                writer.emit(STEP, "r", i)
            synchronise()
            until(lambda expected=first + 10: recorder.stats.events >= expected)  # type: ignore[misc]
        writer.close()
        synchronise()

    assert numbers(output) == list(range(30))
