"""The recorder beside running processes: nothing lost or doubled whoever is killed, every snapshot whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import analyze, stages
from kvtrace.collect import Recorder, backlog, recorder
from kvtrace.store import Store, working_path
from tests import spooled
from tests.recordings import ROOT, STEP, numbers, record_once, write
from tests.waiting import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from kvtrace.collect.stats import Stats


def test_folders_and_processes_may_come_later(spool: Path, output: Path) -> None:
    second = spool.with_name("second")
    recorder = Recorder(output, [spool, second], {}, publish_interval_s=0.1, analysis=None)
    with recorder:
        recorder.start()
        write(spool, 0, 10)
        until(lambda: recorder.stats.events >= 10)
        write(second, 10, 10)
        until(lambda: recorder.stats.events >= 20)
        until(lambda: output.exists() and numbers(output) == list(range(20)))  # published while recording

    assert numbers(output) == list(range(20))


def test_a_killed_writers_events_are_all_there(spool: Path, output: Path) -> None:
    """Whatever emit() returned from is in the store, although the process got no chance to say goodbye."""
    script = f"""
for i in range(50_000):
    tracer.emit({STEP}, f"r{{i // 25}}", i)
    if i % 2000 == 0:
        tracer.flush()  # else, where the spool's thread gets no processor, some are dropped and counted
print("emitted", flush=True)
input()
"""
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.1, analysis=None)
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


def test_what_trickles_in_is_committed_a_few_times_a_second(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit costs some 20 ms of processor time, so that one for every few events takes a whole core."""
    script = f"""
import time
for i in range(400):
    tracer.emit({STEP}, "r", i)
    time.sleep(0.002)
"""
    monkeypatch.setattr(recorder, "POLL_INTERVAL_S", 0.2)
    seen = Commits()
    with Recorder(output, [spool], {}, publish_interval_s=60, analysis=None, observers=[seen]) as following:
        began_s = time.monotonic()
        following.start()
        writer = spooled.start(script, spool)
        writer.communicate(timeout=LONG_S)
        until(lambda: sum(seen.events) >= 400)

    # One at once and one at the end come besides; each is noted when it is over, however long it took.
    assert len(seen.events) <= (seen.at_s[-1] - began_s) / 0.2 + 2
    assert numbers(output) == list(range(400))


class Commits:
    """An observer that notes when something was committed, and how many events."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.events: list[int] = []

    def took(self, _store: Store, events: pa.Table) -> None:
        self.at_s.append(time.monotonic())
        self.events.append(events.num_rows)

    def over(self, _store: Store, _keys: Sequence[int], _stats: Stats) -> None:
        pass

    def facts(self) -> dict[str, str]:
        return {}

    def finish(self) -> None:
        pass


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


# A recorder a line of stdin, in a process of its own that is forked, since what it imports takes longer than it lives.
RECORD_OFTEN = """
import os, sys, time
from pathlib import Path
from kvtrace.collect import Recorder, recorder
recorder.POLL_INTERVAL_S = 0.01
for _ in sys.stdin:
    if not (child := os.fork()):
        with Recorder(Path(sys.argv[1]), [Path(sys.argv[2])], {}, publish_interval_s=0.05, analysis=None) as r:
            r.start()
            print(os.getpid(), flush=True)
            time.sleep(60)
    os.waitpid(child, 0)
"""


def test_a_killed_recorder_neither_loses_nor_repeats(spool: Path, output: Path) -> None:
    """Killed at random moments while writers write, and started again: every number once, and again a clean end."""
    chance = random.Random(7)
    total = 30_000
    script = f"""
import time
for i in range({total}):
    tracer.emit({STEP}, f"r{{i // 25}}", i)
    if i % 500 == 0:
        time.sleep(0.03)
"""
    recorders = subprocess.Popen(
        [sys.executable, "-c", RECORD_OFTEN, str(output), str(spool)], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert recorders.stdin is not None
    assert recorders.stdout is not None
    writer = spooled.start(script, spool)
    kills = 0
    while writer.poll() is None or kills < 3:
        print(file=recorders.stdin, flush=True)
        started = int(recorders.stdout.readline())
        time.sleep(chance.uniform(0.02, 0.8))
        os.kill(started, signal.SIGKILL)
        kills += 1
    recorders.communicate(timeout=60)
    writer.communicate(timeout=60)
    assert working_path(output).exists()
    last = record_once(output, spool)

    assert last.resumed
    assert kills >= 3
    assert numbers(output) == list(range(total))
    assert [path.name for path in output.parent.iterdir() if path.is_file()] == [output.name]


def test_a_backlog_that_was_not_analysed_before_a_crash_is_later(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events are older than any snapshot; the recorder dies twice before it comes to them."""
    monkeypatch.setattr(analyze, "WHOLE_ANALYSIS_EVENTS", 0)
    monkeypatch.setattr(backlog, "RESUME_MARGIN_NS", 0)
    spooled.run(f"tracer.emit({stages.DECODE_ENQUEUED.code}, 'cmpl-a-0-bbbbbbbb', 5)", spool)
    for _ in range(2):
        dying = Recorder(output, [spool], {})
        dying._open()
        assert dying._store is not None
        dying._pass(dying._store)
        dying._folders.close()
        dying._store.close()
    record_once(output, spool, analysis=analyze.worked_out)

    with Store.open(output) as store:
        assert [row["request_id"] for row in store.rows("FROM request")] == ["a"]
        assert store.rows("FROM run WHERE name LIKE '%unanalyzed%'") == []


def test_resuming_also_reads_the_folders_of_the_recording_that_was_killed(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    killed = RECORD.replace("sys.stdin.read()", "import time; time.sleep(1.0); import os; os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", killed, str(output), str(spool)], cwd=ROOT, check=False)
    assert done.returncode == -9
    write(spool, 10, 10)
    record_once(output, spool.with_name("other"))

    assert numbers(output) == list(range(20))


KILL_ONCE_CONSUMED = """
    import os, time
    end_s = time.monotonic() + 60
    while any(Path(sys.argv[2]).glob("*.kvt")) and time.monotonic() < end_s:
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
""".strip()


def test_a_torn_working_file_is_rebuilt_from_snapshot_and_spool(spool: Path, output: Path) -> None:
    """Files are deleted only once a snapshot holds them, so both together lack nothing."""
    write(spool, 0, 10)
    script = RECORD.replace("sys.stdin.read()", KILL_ONCE_CONSUMED)
    subprocess.run([sys.executable, "-c", script, str(output), str(spool)], cwd=ROOT, check=False)
    assert list(spool.glob("*.kvt")) == []
    write(spool, 10, 10)
    working = working_path(output)
    working.write_bytes(working.read_bytes()[:5000])
    recorder = record_once(output, spool)

    assert numbers(output) == list(range(20))
    assert [line for line in recorder.stats.messages if "rebuilt from the last snapshot" in line]
    assert recorder.stats.skipped_files == 0


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
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.1, analysis=None)
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
