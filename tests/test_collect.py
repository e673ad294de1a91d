"""The recorder: every event once, whoever is killed; whole snapshots; nothing overwritten, nothing waited for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtrace import emit, stages, wire
from kvtrace.collect import Recorder
from kvtrace.errors import StoreError
from kvtrace.store import Store, working_path
from tests import spooled

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
STEP = stages.STEP_STARTED.code
HOSTILE = ["it's", "'; DROP TABLE event; --", "a\x00b\x1b[31m\r\n", "é 漢 🦆", "x" * 4096]
MS = 1_000_000


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


def record_once(output: Path, *spools: Path, **options: Any) -> Recorder:
    recorder = Recorder(output, list(spools), {"command": "test"}, **options)
    recorder.run_once()
    return recorder


def numbers(output: Path, stage: str = "step.started") -> list[int]:
    """Return what payload a of that stage holds, in order: the tests count with it."""
    with Store.open(output) as store:
        return [row["a"] for row in store.rows("SELECT a FROM event WHERE stage = $s ORDER BY a", {"s": stage})]


def write(spool: Path, first: int, count: int, request: str = "r{}", **facts: str) -> None:
    """Emit `count` numbered events from a process of its own, which ends."""
    script = f"""
for name, value in {facts!r}.items():
    tracer.fact(name, value)
for i in range({first}, {first + count}):
    tracer.emit({STEP}, {request!r}.format(i // 25), i)
"""
    spooled.run(script, spool)


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


# What is there ---------------------------------------------------------------------------------------


def test_everything_comes_once_with_its_process(spool: Path, output: Path) -> None:
    write(spool, 0, 100, kind="core", engine_id="P", vllm="0.32.0")
    write(spool, 100, 50, kind="core", engine_id="D", vllm="0.32.0")
    recorder = record_once(output, spool)

    assert numbers(output) == list(range(150))
    with Store.open(output) as store:
        processes = store.rows("SELECT facts['engine_id'] AS engine, lost_records FROM process ORDER BY process")
        requests = store.rows("SELECT request, count(*) AS n FROM event WHERE stage = 'step.started' GROUP BY request")
        run = {row["name"]: row["value"] for row in store.rows("SELECT * FROM run")}
    assert {row["engine"] for row in processes} == {"P", "D"}
    assert [row["lost_records"] for row in processes] == [0, 0]
    assert {row["request"]: row["n"] for row in requests} == {f"r{i}": 25 for i in range(6)}
    assert (run["command"], run["vllm"], run["recorder.state"]) == ("test", "0.32.0", "complete")
    assert recorder.stats.processes == 2


def test_times_are_unix_times_on_one_offset(spool: Path, output: Path) -> None:
    """Two processes of one host share the offset exactly, so that their order stays what the clock said."""
    before_ns = time.time_ns()
    write(spool, 0, 1)
    write(spool, 1, 1)
    after_ns = time.time_ns()
    record_once(output, spool)

    with Store.open(output) as store:
        rows = store.rows("SELECT t_ns, a FROM event WHERE stage = 'step.started' ORDER BY t_ns")
        offsets = store.rows("SELECT DISTINCT offset_ns FROM process")
    assert [row["a"] for row in rows] == [0, 1]
    assert before_ns - 5 * MS <= rows[0]["t_ns"] <= rows[1]["t_ns"] <= after_ns + 5 * MS
    assert len(offsets) == 1


def test_an_empty_spool_makes_an_empty_store(spool: Path, output: Path) -> None:
    spool.mkdir()
    record_once(output, spool, spool.with_name("missing"))

    with Store.open(output) as store:
        assert store.rows("SELECT count(*) AS n FROM event") == [{"n": 0}]
        assert store.rows("SELECT * FROM ttft") == []


def test_hostile_ids_come_through(spool: Path, output: Path) -> None:
    script = f"""
for i, text in enumerate({HOSTILE!r}):
    tracer.emit({STEP}, text, i, ref=text)
tracer.fact("model", "it's; DROP TABLE run")
"""
    spooled.run(script, spool)
    record_once(output, spool)

    with Store.open(output) as store:
        rows = store.rows("SELECT request, ref FROM event WHERE stage = 'step.started' ORDER BY a")
        model = store.rows("SELECT value FROM run WHERE name = 'model'")
    assert [(row["request"], row["ref"]) for row in rows] == [(text, text) for text in HOSTILE]
    assert model == [{"value": "it's; DROP TABLE run"}]


def test_consumed_files_are_deleted_and_those_of_living_writers_kept(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    alive = emit.Emitter(spool)
    alive.emit(STEP, "r", 10)
    recorder = record_once(output, spool)
    left = {path.name for path in spool.iterdir()}
    alive.close()

    assert numbers(output) == list(range(11))
    assert recorder.stats.removed_files >= 1
    assert left
    assert all(f"-{os.getpid()}-" in name for name in left)


def test_nothing_is_deleted_when_told_so(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    before = sorted(spool.iterdir())
    record_once(output, spool, delete_consumed=False)

    assert sorted(spool.iterdir()) == before


def test_lost_records_are_counted_by_stage(spool: Path, output: Path) -> None:
    """A spent budget drops records and counts them; the store says which."""
    script = f"for i in range(60_000):\n    tracer.emit({STEP}, '', i)\n"
    spooled.run(script, spool, KVTRACE_SPOOL_BUDGET="1048576")
    recorder = record_once(output, spool)

    kept = len(numbers(output))
    with Store.open(output) as store:
        lost = store.rows("SELECT stage, lost_records FROM loss")
    assert 0 < kept < 60_000
    assert lost == [{"stage": "step.started", "lost_records": 60_000 - kept}]
    assert recorder.stats.lost == 60_000 - kept


# Files that are none ---------------------------------------------------------------------------------


def test_garbage_is_named_once_and_skipped(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    good = next(spool.glob("*.kvt")).read_bytes()
    (spool / "empty.kvt").touch()
    (spool / "foreign.kvt").write_bytes(b"SQLite format 3\x00" * 1000)
    (spool / "short.kvt").write_bytes(good[:100])
    (spool / "random.kvt").write_bytes(good[:900] + os.urandom(8000))
    (spool / "folder.kvt").mkdir()
    (spool / "notes.txt").write_text("not ours at all")
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.1)
    with recorder:
        recorder.start()
        time.sleep(1.5)

    assert numbers(output) == list(range(10))
    for name in ("empty.kvt", "foreign.kvt", "short.kvt", "random.kvt", "folder.kvt"):
        assert len([line for line in recorder.stats.skipped if name in line]) == 1, name
        assert (spool / name).exists()
    assert not [line for line in recorder.stats.skipped if "notes.txt" in line]
    with Store.open(output) as store:
        assert store.rows("SELECT count(*) AS n FROM recorder")[0]["n"] == 5


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    path = next(spool.glob("*.kvt"))
    path.chmod(0)
    recorder = record_once(output, spool)

    assert [line for line in recorder.stats.skipped if path.name in line]


def test_a_cut_off_file_gives_its_whole_records(spool: Path, output: Path) -> None:
    write(spool, 0, 100)
    path = max(spool.glob("*.kvt"), key=lambda path: len(spooled.read([path]).of(STEP)))
    data = path.read_bytes()
    last = data.rindex((data.rindex(STEP.to_bytes(2, "little")) // 64 * 64).to_bytes(8, "little"))
    path.write_bytes(data[: last - 640])
    record_once(output, spool)

    found = numbers(output)
    assert found == list(range(len(found)))
    assert 50 < len(found) < 100


# Following -------------------------------------------------------------------------------------------


def test_folders_and_processes_may_come_later(spool: Path, output: Path) -> None:
    second = spool.with_name("second")
    recorder = Recorder(output, [spool, second], {}, publish_interval_s=0.1)
    with recorder:
        recorder.start()
        write(spool, 0, 10)
        until(lambda: recorder.stats.events >= 10)
        write(second, 10, 10)
        until(lambda: recorder.stats.events >= 20)
        until(lambda: recorder.stats.published > 2)
        seen_while_recording = numbers(output)

    assert seen_while_recording == list(range(len(seen_while_recording)))
    assert numbers(output) == list(range(20))


def test_a_killed_writers_events_are_all_there(spool: Path, output: Path) -> None:
    """Whatever emit() returned from is in the store, although the process got no chance to say goodbye."""
    script = f"""
for i in range(50_000):
    tracer.emit({STEP}, f"r{{i // 25}}", i)
print("emitted", flush=True)
input()
"""
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.1)
    with recorder:
        recorder.start()
        process = subprocess.Popen(
            [sys.executable, "-c", "from kvtrace import emit\ntracer = emit.tracer()\n" + script],
            env={**os.environ, "KVTRACE_SPOOL": str(spool)}, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "emitted\n"
        process.kill()
        process.wait()

    assert numbers(output) == list(range(50_000))
    assert list(spool.glob("*.kvt")) == []


RECORD = """
import sys
from pathlib import Path
from kvtrace.collect import Recorder, recorder
recorder.POLL_INTERVAL_S = 0.01
with Recorder(Path(sys.argv[1]), [Path(sys.argv[2])], {}, publish_interval_s=0.05, analysis=None) as r:
    r.start()
    print("started", flush=True)
    sys.stdin.read()
"""


def test_a_killed_recorder_neither_loses_nor_repeats(spool: Path, output: Path) -> None:
    """Killed at random moments while writers write, and started again: every number once, and again a clean end."""
    chance = random.Random(7)
    total = 150_000
    script = f"""
import time
for i in range({total}):
    tracer.emit({STEP}, f"r{{i // 25}}", i)
    if i % 2000 == 0:
        time.sleep(0.02)
"""
    writer = spooled.start(script, spool)
    kills = 0
    while writer.poll() is None or kills < 3:
        recorder = subprocess.Popen(
            [sys.executable, "-c", RECORD, str(output), str(spool)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == "started\n"
        time.sleep(chance.uniform(0.05, 1.2))
        recorder.send_signal(signal.SIGKILL)
        recorder.communicate()
        kills += 1
    writer.communicate(timeout=60)
    assert working_path(output).exists()
    last = record_once(output, spool)

    assert last.resumed
    assert kills >= 3
    assert numbers(output) == list(range(total))
    assert [path.name for path in output.parent.iterdir() if path.is_file()] == [output.name]


def test_resuming_also_reads_the_folders_of_the_recording_that_was_killed(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    killed = RECORD.replace("sys.stdin.read()", "import time; time.sleep(1.0); import os; os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", killed, str(output), str(spool)], cwd=ROOT, check=False)
    assert done.returncode == -9
    write(spool, 10, 10)
    record_once(output, spool.with_name("other"))

    assert numbers(output) == list(range(20))


def test_a_torn_working_file_is_rebuilt_from_snapshot_and_spool(spool: Path, output: Path) -> None:
    """Files are deleted only once a snapshot holds them, so both together lack nothing."""
    write(spool, 0, 10)
    script = RECORD.replace("sys.stdin.read()", "import time; time.sleep(1.5); import os; os.kill(os.getpid(), 9)")
    subprocess.run([sys.executable, "-c", script, str(output), str(spool)], cwd=ROOT, check=False)
    assert list(spool.glob("*.kvt")) == []
    write(spool, 10, 10)
    working = working_path(output)
    working.write_bytes(working.read_bytes()[:5000])
    recorder = record_once(output, spool)

    assert numbers(output) == list(range(20))
    assert [line for line in recorder.stats.skipped if "rebuilt from the last snapshot" in line]


READ = """
import sys
from pathlib import Path
from kvtrace.store import Store
last, seen = 0, 0
while True:
    was_last = Path(sys.argv[2]).exists()
    with Store.open(sys.argv[1]) as store:
        numbers = [row["a"] for row in store.rows("SELECT a FROM event WHERE stage = 'step.started' ORDER BY a")]
    assert numbers == list(range(len(numbers))), "a hole, or one twice"
    assert len(numbers) >= last
    seen += len(numbers) > last
    last = len(numbers)
    if seen == 10:
        print("seen 10", flush=True)
        seen += 1
    if was_last:
        break
print(last)
"""


def test_snapshots_are_whole_while_recording(spool: Path, output: Path) -> None:
    """No snapshot has a hole, an event twice, or fewer events than the one before; the last one has them all."""
    enough, ended = output.with_name("enough"), output.with_name("ended")
    writer = spooled.start(
        "import itertools, time\nfrom pathlib import Path\nnumbers = itertools.count()\n"
        f"while not Path({str(enough)!r}).exists():\n"
        "    for i in itertools.islice(numbers, 100):\n"
        f"        tracer.emit({STEP}, f'r{{i // 25}}', i)\n"
        "    time.sleep(0.05)\nprint(next(numbers))\n",
        spool,
    )
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=None)
    with recorder:
        recorder.start()
        reader = subprocess.Popen(
            [sys.executable, "-c", READ, str(output), str(ended)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert reader.stdout is not None
        assert reader.stdout.readline() == "seen 10\n"
        enough.touch()
        written = int(writer.communicate(timeout=90)[0])
    ended.touch()
    out, err = reader.communicate(timeout=60)

    assert reader.returncode == 0, err
    assert int(out) == written
    assert numbers(output) == list(range(written))


def test_a_folder_that_is_removed_costs_only_what_was_in_it(spool: Path, output: Path) -> None:
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.1)
    with recorder:
        recorder.start()
        write(spool, 0, 10)
        until(lambda: recorder.stats.events >= 10)
        for path in spool.iterdir():
            path.unlink(missing_ok=True)
        spool.rmdir()
        time.sleep(0.6)
        write(spool, 10, 10)

    assert numbers(output) == list(range(20))


# What it must not do ---------------------------------------------------------------------------------


def test_a_finished_store_is_not_overwritten(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    record_once(output, spool)
    before = output.read_bytes()
    write(spool, 10, 10)

    with pytest.raises(StoreError, match="exists and is not overwritten; use --force or name another output"):
        record_once(output, spool)
    assert output.read_bytes() == before
    record_once(output, spool, force=True)
    assert numbers(output) == list(range(10, 20))


def test_a_foreign_file_is_not_overwritten(spool: Path, output: Path) -> None:
    output.write_text("my thesis")

    with pytest.raises(StoreError, match="exists and is not overwritten"):
        record_once(output, spool)
    assert output.read_text() == "my thesis"


def test_a_missing_output_folder_is_named(spool: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a folder"):
        record_once(tmp_path / "no" / "run.duckdb", spool)


def test_a_failing_analysis_costs_no_events(spool: Path, output: Path) -> None:
    def broken(_store: Store, _since_ns: int | None) -> int:
        raise ZeroDivisionError("the answer")

    write(spool, 0, 10)
    recorder = record_once(output, spool, analysis=broken)

    assert numbers(output) == list(range(10))
    assert [line for line in recorder.stats.skipped if "ZeroDivisionError: the answer" in line]


def test_a_failed_publication_is_tried_again(spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk for a while: events wait in the working file and in the spool, and nothing is deleted meanwhile."""
    publish, calls = Store.publish, []

    def flaky(store: Store, target: Path) -> None:
        calls.append(target)
        if 1 < len(calls) < 4:
            raise StoreError("no space")
        publish(store, target)

    monkeypatch.setattr(Store, "publish", flaky)
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.05)
    with recorder:
        recorder.start()
        write(spool, 0, 10)
        until(lambda: len(calls) >= 2)
        kept_meanwhile = list(spool.glob("*.kvt"))
        until(lambda: len(calls) >= 4)
        until(lambda: recorder.failure is None and not list(spool.glob("*.kvt")))

    assert kept_meanwhile
    assert numbers(output) == list(range(10))


def test_publishing_takes_a_tenth_of_the_time_at_most(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Store.publish

    def slow(store: Store, target: Path) -> None:
        time.sleep(0.2)
        publish(store, target)

    monkeypatch.setattr(Store, "publish", slow)
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.01)
    alive = emit.Emitter(spool)
    with recorder:
        recorder.start()
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + 5:
            alive.emit(STEP, "r", 1)
            time.sleep(0.01)
        published = recorder.stats.published
    alive.close()

    assert published - 1 <= 5 / 2 + 1


# Other hosts -----------------------------------------------------------------------------------------


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
    assert [line for line in recorder.stats.skipped if "holds the same records as" in line]


def test_a_copy_that_is_renewed_goes_on_where_it_was(spool: Path, output: Path) -> None:
    """A synchronising copy replaces a file by a longer one under the same name: only what is new is taken."""
    source = spool.with_name("source")
    writer = emit.Emitter(source)
    copied = spool
    copied.mkdir()
    recorder = Recorder(output, [copied], {}, publish_interval_s=0.1)

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
