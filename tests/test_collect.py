"""The recorder takes in what is there: every event once, what is no spool file named and passed over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvtrace import emit
from kvtrace.collect import Recorder, notices
from kvtrace.collect.stats import Stats
from kvtrace.store import Store
from tests import spooled
from tests.recordings import STEP, numbers, record_once, write

HOSTILE = ["it's", "'; DROP TABLE event; --", "a\x00b\x1b[31m\r\n", "é 漢 🦆", "x" * 4096]


MS = 1_000_000


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
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.1, analysis=None)
    with recorder:
        recorder.start()
        time.sleep(1.5)

    assert numbers(output) == list(range(10))
    for name in ("empty.kvt", "foreign.kvt", "short.kvt", "random.kvt", "folder.kvt"):
        assert len([line for line in recorder.stats.messages if name in line]) == 1, name
        assert (spool / name).exists()
    assert not [line for line in recorder.stats.messages if "notes.txt" in line]
    with Store.open(output) as store:
        assert store.rows("SELECT count(*) AS n FROM recorder")[0]["n"] == 5
        assert store.rows("SELECT value FROM run WHERE name = 'recorder.skipped_files'")[0]["value"] == "5"


def test_of_many_messages_of_a_kind_few_are_said_and_the_rest_counted(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder full of foreign files fills neither the terminal nor the store; another kind is still heard."""
    monkeypatch.setattr(notices, "KEPT", 50)
    spool.mkdir()
    for number in range(120):
        (spool / f"a{number:03}.kvt").write_bytes(b"SQLite format 3\x00" * 1000)
    (spool / "z.kvt").touch()

    stats = Recorder(output, [spool], {}, analysis=None).run_once()

    assert [("z.kvt: empty" in line) for line in stats.messages] == [False] * 20 + [True]
    assert stats.unsaid == {"not a kvtrace spool file; skipped": 100}
    with Store.open(output) as store:
        assert store.rows("SELECT count(*) AS n, count(DISTINCT subject) AS m FROM recorder") == [{"n": 51, "m": 51}]
    assert (stats.kept_messages, stats.skipped_files) == (51, 121)


def test_kinds_without_end_are_bounded_too() -> None:
    stats = Stats()
    said = notices.Notices(stats)
    for number in range(10_000):
        said.add("part", "failed in a way of its own, " + "abcdefghij"[number % 10] * (number // 10 + 1))

    assert len(said.unwritten) == stats.kept_messages <= notices.KINDS + notices.KEPT
    assert len(stats.messages) <= notices.KINDS + notices.SHOWN
    assert stats.unsaid == {"": 10_000 - len(stats.messages)}


def test_a_file_that_is_gone_is_skipped_no_more(spool: Path, output: Path) -> None:
    """What was said of it stays; whoever watches the number sees that it is mended."""
    spool.mkdir()
    foreign = spool / "foreign.kvt"
    foreign.write_bytes(b"SQLite format 3\x00" * 1000)
    skipped = []
    with Recorder(output, [spool], {}, analysis=None) as recorder:
        store = recorder._store
        assert store is not None
        for _ in range(2):
            recorder._pass(store)
            skipped.append(recorder.stats.skipped_files)
            foreign.unlink(missing_ok=True)

    assert skipped == [1, 0]
    assert len(recorder.stats.messages) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    path = next(spool.glob("*.kvt"))
    path.chmod(0)
    recorder = record_once(output, spool)

    assert [line for line in recorder.stats.messages if path.name in line]


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
