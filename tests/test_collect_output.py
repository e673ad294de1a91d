"""What the recorder must not do: overwrite, lose events to a failure, or copy the store all day."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import cli, emit, stages
from kvtrace.cli.recording import LATER_NS
from kvtrace.collect import Recorder, conclusions
from kvtrace.errors import StoreError
from kvtrace.store import Store, copies
from tests import spooled
from tests.recordings import ROOT, STEP, at_once, numbers, record_once, write
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrace.store.publication import Extent


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


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


def test_a_store_that_another_recorder_writes_is_not_discarded(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    script = """
import sys
from pathlib import Path
from kvtrace.collect import Recorder, conclusions
with Recorder(Path(sys.argv[1]), [Path(sys.argv[2])], {}):
    print("ready", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(output), str(spool)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(StoreError, match="is being recorded by another process"):
        record_once(output, spool.with_name("none"), force=True)
    other.communicate(timeout=60)

    assert other.returncode == 0
    assert numbers(output) == list(range(10))


def test_a_copy_that_cannot_be_put_in_place_costs_the_recording_nothing(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    copy = output.with_name("copy.duckdb")
    copy.with_name("copy.duckdb.spare").mkdir()  # in the way of what is kept beside the copy
    recorder = record_once(output, spool, copies=[copy])

    assert numbers(output) == list(range(10))
    assert recorder.stats.removed_files
    assert any("copy.duckdb" in message for message in recorder.stats.messages)


def test_a_copy_is_told_from_every_other_store(spool: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also while Grafana's plug-in has it open for writing; a copy under another name is somebody's store."""
    copy, kept = output.with_name("copy.duckdb"), output.with_name("kept.duckdb")
    write(spool, 0, 10)
    record_once(output, spool, copies=[copy])
    shutil.copyfile(copy, kept)
    reader = "import duckdb, sys; duckdb.connect(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", reader, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as plugin:
        assert plugin.stdout is not None
        plugin.stdout.readline()
        told = [copies.is_copy(path) for path in (copy, output, kept)]
        plugin.communicate(timeout=60)
    before = kept.read_bytes()
    asked = ["record", "--once", "--spool", str(spool), "-o", str(output.with_name("next.duckdb"))]

    assert told == [True, False, False]
    for options, code in ((("--grafana-copy", str(kept)), 2), (("--grafana-copy", str(copy)), 0)):
        assert cli.main([*asked, *options]) == code
    assert "kept.duckdb is there and no copy that a recording put there" in capsys.readouterr().err
    assert kept.read_bytes() == before
    assert cli.main([*asked, "--grafana-copy", str(kept), "--force"]) == 0
    assert kept.read_bytes() != before


def test_what_happened_before_a_time_is_left_out_but_for_where_threads_stand(spool: Path, output: Path) -> None:
    """A lab's engines warm up before they are measured; what they emit meanwhile is read and let go."""
    code = {stage.name: stage.code for stage in (stages.STEP_STARTED, stages.SENDER_SLEPT, stages.DISABLED)}
    spooled.run(
        f"""
for t_ns, number in ((100, 1), (200, 2), (300, 3)):
    for code in {list(code.values())}:
        tracer.emit(code, "", number, 0, 0, 0, "", t_ns)
""",
        spool,
    )
    recorder = Recorder(output, [spool], {})
    recorder.from_monotonic_ns = 200
    recorder.run_once()

    assert {name: numbers(output, name) for name in code} == {
        "step.started": [2, 3], "sender.slept": [1, 2, 3], "tracing.disabled": [1, 2, 3],
    }  # fmt: skip


def test_a_pass_under_way_keeps_what_happens_once_recording_begins(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load begins as soon as the time is set, perhaps while the recorder looks for files."""
    recorder = Recorder(output, [spool], {}, analysis=None)
    recorder.from_monotonic_ns = LATER_NS
    with recorder:
        scan = recorder._folders.scan

        def meanwhile() -> None:
            if recorder.from_monotonic_ns == LATER_NS:
                recorder.from_monotonic_ns = time.monotonic_ns()
                write(spool, 0, 3)
            scan()

        monkeypatch.setattr(recorder._folders, "scan", meanwhile)

    assert numbers(output) == [0, 1, 2]


def test_a_file_of_which_nothing_more_is_kept_is_read_to_its_end(spool: Path, output: Path) -> None:
    """The engines of a lab that does not come up are killed: it leaves no spool behind."""
    go = output.with_name("go")
    script = f"""
import os, pathlib, time
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.01)
tracer.emit({STEP}, "r0", 1)
os._exit(0)
"""
    recorder = Recorder(output, [spool], {}, analysis=None)
    recorder.from_monotonic_ns = LATER_NS
    with spooled.start(script, spool) as killed, recorder:
        store = recorder._store
        assert store is not None
        until(lambda: not recorder._pass(store) and recorder.stats.events > 0)
        go.touch()
        assert killed.wait(60) == 0

    assert numbers(output) == []
    assert list(spool.glob("*.kvt")) == []


@pytest.mark.parametrize("t_ns", [2**62 + 2**61, 2**63 - 1])
def test_a_time_that_no_clock_shows_costs_its_record_alone(spool: Path, output: Path, t_ns: int) -> None:
    """After the year 2200: one such record kept every later one from being analysed, or came round to a time."""
    spooled.run(
        f"""
for number, t_ns in enumerate((0, {t_ns}, 0)):
    tracer.emit({STEP}, "r0", number, 0, 0, 0, "", t_ns)
""",
        spool,
    )
    recorder = record_once(output, spool)

    assert numbers(output) == [0, 2]
    (said,) = recorder.stats.messages
    assert "holds times that no clock shows, in 1 record or more" in said
    with Store.open(output) as store:
        ((first_ns, last_ns),) = store.select("SELECT first_ns, last_ns FROM process").values
    assert abs(time.time_ns() - first_ns) + abs(time.time_ns() - last_ns) < 600_000_000_000


def test_a_foreign_file_is_not_overwritten(spool: Path, output: Path) -> None:
    output.write_text("my thesis")

    with pytest.raises(StoreError, match="exists and is not overwritten"):
        record_once(output, spool)
    assert output.read_text() == "my thesis"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text("a diary")], ids=["a pipe", "a text"])
def test_what_is_no_store_is_not_overwritten_by_force_either(
    make: Callable[[Path], object], spool: Path, output: Path
) -> None:
    make(output)

    with pytest.raises(StoreError, match="no DuckDB file, so it is not overwritten; name another output"):
        record_once(output, spool, force=True)

    assert output.is_fifo() or output.read_text() == "a diary"


def test_a_missing_output_folder_is_named(spool: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a folder"):
        record_once(tmp_path / "no" / "run.duckdb", spool)


def test_a_failing_analysis_costs_no_events(spool: Path, output: Path) -> None:
    def broken(_store: Store, _since_ns: int | None) -> int:
        raise ZeroDivisionError("the answer")

    write(spool, 0, 10)
    recorder = record_once(output, spool, analysis=at_once(broken))

    assert numbers(output) == list(range(10))
    assert [line for line in recorder.stats.messages if "ZeroDivisionError: the answer" in line]


def test_a_failed_publication_is_tried_again(spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk for a while: events wait in the working file and in the spool, and nothing is deleted meanwhile."""
    publish, failed = Store.publish, []
    has_room = threading.Event()

    def flaky(store: Store, target: Path, *, whole: bool = True) -> Extent | None:
        if has_room.is_set():
            return publish(store, target, whole=whole)
        failed.append(target)
        raise StoreError("no space")

    recorder = Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=None)
    with recorder:
        monkeypatch.setattr(Store, "publish", flaky)
        recorder.start()
        write(spool, 0, 10)
        before = len(failed)
        until(lambda: len(failed) >= before + 2)
        kept_meanwhile = list(spool.glob("*.kvt"))
        has_room.set()
        until(lambda: recorder.failure is None and not list(spool.glob("*.kvt")))

    assert kept_meanwhile
    assert numbers(output) == list(range(10))


def test_publishing_takes_a_tenth_of_the_time_at_most(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Store.publish

    def slow(store: Store, target: Path, *, whole: bool = True) -> Extent | None:
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass
        return publish(store, target, whole=whole)

    monkeypatch.setattr(Store, "publish", slow)
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.01, analysis=None)
    alive = emit.Emitter(spool)
    with recorder:
        recorder.start()
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + 3:
            alive.emit(STEP, "r", 1)
            time.sleep(0.01)
        published = recorder.stats.published
        took_s = time.monotonic() - begin_s
    alive.close()

    # The first two are whole and come at once; each further one takes 0.2 s, and nine times that goes by behind it.
    assert published - 2 <= took_s / 2 + 1


def test_a_recorder_started_anew_publishes_what_has_come_before_it_is_analysed(spool: Path, output: Path) -> None:
    """What was owed is a minute and more of requests; whoever looks meanwhile sees the events."""
    dying = Recorder(output, [spool], {}, analysis=None)
    dying._open()
    assert dying._store is not None
    dying._store.close()
    write(spool, 0, 10)
    may_go_on = threading.Event()

    def slow(_store: Store, _since_ns: int | None) -> int:
        assert may_go_on.wait(60)
        return 0

    with Recorder(output, [spool], {}, analysis=at_once(slow)) as anew:
        anew.start()
        try:
            until(lambda: numbers(output) == list(range(10)))
            assert not anew.stats.analyze_s
        finally:
            may_go_on.set()


def test_a_snapshot_that_somebody_kept_back_comes_as_soon_as_he_lets_go(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another analysis, which would only make it later, and before one is due."""
    analysed: list[float] = []
    publish = Store.publish

    def too_much(store: Store, target: Path, *, whole: bool = True) -> Extent | None:
        return publish(store, target, whole=whole and len(analysed) < 3)

    monkeypatch.setattr(Store, "publish", too_much)

    def took(_store: Store, _since_ns: int | None) -> int:
        analysed.append(time.monotonic())
        return 0

    recorder = Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=at_once(took))
    alive = emit.Emitter(spool)
    with recorder:
        recorder.start()
        while recorder.stats.published < 4:
            alive.emit(STEP, "r", 1)
            time.sleep(0.01)
        with output.with_name("run.duckdb.spare").open("rb"):
            while not recorder._pace.is_refused:
                alive.emit(STEP, "r", 1)
                time.sleep(0.01)
            recorder._pace.pause(60.0)
            published, times = recorder.stats.published, len(analysed)
            time.sleep(0.6)
            assert recorder.stats.published == published
        until(lambda: recorder.stats.published > published)
        assert len(analysed) <= times + 1  # one may have been under way
    alive.close()


def test_a_snapshot_does_not_wait_for_findings(spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered from the newest 20,000 requests, and come out with the next one."""
    publish, order = Store.publish, []

    def published(store: Store, target: Path, *, whole: bool = True) -> Extent | None:
        order.append("published")
        return publish(store, target, whole=whole)

    def found(_store: Store, _newest: int) -> int:
        order.append("found")
        return 0

    monkeypatch.setattr(Store, "publish", published)
    monkeypatch.setattr(conclusions.table, "write", found)
    write(spool, 0, 10)
    with Recorder(output, [spool], {}, analysis=at_once(lambda _store, _since_ns: 0)) as recorder:
        store = recorder._store
        assert store is not None
        recorder._pass(store)
        order.clear()
        recorder._analyze_and_publish(store)
        assert order == ["published", "found"]
        recorder._analyze_and_publish(store)
        assert order == ["published", "found", "published"]
