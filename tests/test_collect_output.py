"""What the recorder must not do: overwrite, or lose events to a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import cli, stages
from kvtrace.cli.recording import LATER_NS
from kvtrace.collect import Recorder
from kvtrace.errors import StoreError
from kvtrace.store import Store, copies
from tests import spooled
from tests.recordings import ROOT, STEP, at_once, numbers, record_once, write
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable


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
    for options, code in ((("--grafana-copy", str(kept)), 1), (("--grafana-copy", str(copy)), 0)):
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
