"""Where the forward thread runs, and who is beside it: read from the kernel's own files, real ones and made-up ones."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from instrumented_connectors import cores
from instrumented_connectors.cores import Cores, Placed
from tests.connector_doubles import Memory
from tests.waiting import until

FORWARD = 100


def stat(folder: Path, thread: int, state: str, cpu: int, name: str = "python") -> None:
    """Write the kernel's line about a thread: 38 fields, of which two count."""
    (folder / str(thread)).mkdir(exist_ok=True)
    fields = [state, *["0"] * 35, str(cpu), "0", "0"]
    (folder / str(thread) / "stat").write_text(f"{thread} ({name}) {' '.join(fields)}\n")


def test_who_runs_on_the_forward_threads_cpu_is_counted(tmp_path: Path) -> None:
    """One that runs there, one that sleeps there, one that runs elsewhere. Names may look like the rest of a line."""
    stat(tmp_path, FORWARD, "R", 3)
    stat(tmp_path, 101, "R", 3, ") S 0 0")
    stat(tmp_path, 102, "S", 3)
    stat(tmp_path, 103, "R", 4)

    look = Cores(Memory(), str(tmp_path)).look(FORWARD)
    assert look == Placed(cpu=3, beside=1, running=2, looked=3, names=") S 0 0")


def test_who_runs_there_is_told_by_name(tmp_path: Path) -> None:
    """The kernel's name, marked where the thread came with NIXL's agent; of two alike one. Commas part the names."""
    for thread, name in ((101, "python"), (102, "python"), (103, "a,b"), (104, "async")):
        stat(tmp_path, thread, "R", 3, name)
    stat(tmp_path, FORWARD, "R", 3)
    stat(tmp_path, 105, "R", 4, "elsewhere")
    looking = Cores(Memory(), str(tmp_path), of_agents={101, 104})

    assert looking.look(FORWARD).names == "a b,nixl:async,nixl:python,python"


def test_of_many_threads_some_are_looked_at_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two a look, and from then on the one that was busy; what has ended, and what has begun, is seen in time."""
    monkeypatch.setattr(cores, "IN_TURN", 2)
    monkeypatch.setattr(cores, "LIST_EVERY", 6)
    for thread in (FORWARD, 101, 102, 103, 104, 105):
        stat(tmp_path, thread, "R" if thread == 104 else "S", 0)
    looking = Cores(Memory(), str(tmp_path))

    first = [looking.look(FORWARD) for _ in range(4)]
    assert max(look.beside for look in first[:3]) == 1
    assert first[3] == Placed(cpu=0, beside=1, running=1, looked=3, names="python")
    (tmp_path / "104" / "stat").unlink()
    assert [looking.look(FORWARD).beside for _ in range(2)] == [0, 0]
    looking._busy = [107]  # as if it had ended since the last look, and the list were new
    assert looking.look(FORWARD).beside == 0
    stat(tmp_path, 106, "R", 0)
    assert max(looking.look(FORWARD).beside for _ in range(9)) == 1


def test_without_such_files_nothing_is_said_and_tracing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "EVERY_S", 0.001)
    memory = Memory()
    looking = Cores(memory, str(tmp_path / "none"))
    looking._has_stepped = True
    looking._run(FORWARD)

    assert (memory.events, memory.enabled) == ([], True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_engine_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps make looks, one for however many; when they end so do looks, and the first one after a pause makes one."""
    monkeypatch.setattr(cores, "EVERY_S", 0.005)
    memory = Memory()
    looking = Cores(memory)

    def looks(more_than: int) -> int:
        """Return how many looks there are some time after there were more than that."""
        until(lambda: len(memory.events) > more_than)
        time.sleep(0.2)
        return len(memory.events)

    for _ in range(3):
        looking.stepped()
    first = looks(0)
    looking.stepped()
    second = looks(first)
    looking.stop()

    assert 1 <= first <= 2
    assert second == first + 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_busy_threads_on_one_core_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real threads bound to one CPU, both hashing, which needs no interpreter."""
    monkeypatch.setattr(cores, "EVERY_S", 0.005)
    cpu = min(os.sched_getaffinity(0))

    over, memory = threading.Event(), Memory()
    looking = Cores(memory)

    def work(*, is_forward: bool) -> None:
        os.sched_setaffinity(0, {cpu})
        while not over.is_set():
            if is_forward:
                looking.stepped()
            hashlib.sha256(bytes(1 << 22)).digest()

    busy = [
        threading.Thread(target=work, kwargs={"is_forward": not number}, name=f"hashes-{number}") for number in range(2)
    ]
    for thread in busy:
        thread.start()
    try:
        until(lambda: sum(event.numbers[0] == cpu and event.numbers[1] > 0 for event in memory.events) >= 5)
        until(lambda: any("hashes-1" in event.ref.split(",") for event in memory.events))
    finally:
        looking.stop()
        over.set()
        for thread in busy:
            thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_thread_that_polls_for_nixl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real agent, made by a thread bound to one CPU, as vLLM's worker is: its thread has no name of its own."""
    nixl = pytest.importorskip("nixl._api")
    monkeypatch.setenv("UCX_TLS", "tcp,self,sm")
    told: list[str] = []

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        before = cores.started()
        agent = nixl.nixl_agent("polled", nixl.nixl_agent_config(backends=["UCX"]))
        looking = Cores(Memory(), of_agents=cores.started() - before)
        until(lambda: "nixl:" in looking.look(threading.get_native_id()).names)
        told.append(agent.name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert told == ["polled"]


def test_where_no_more_threads_may_be_started_all_else_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = Memory()
    Cores(memory).stepped()

    assert memory.enabled
