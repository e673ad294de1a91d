"""Snapshots that come while an analysis is under way: newer events beside earlier answers, and nothing owed is lost."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import emit
from kvtrace.collect import Recorder
from kvtrace.collect.backlog import OWED, Backlog
from kvtrace.errors import StoreError
from kvtrace.store import Store
from tests.recordings import STEP, numbers
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrace.analyze import Writing
    from kvtrace.store.publication import Extent


class Slow:
    """An analysis that lets others have their turn until it may go on; then it ends, or fails if it is to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.since_ns: list[int | None] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, _store: Store, since_ns: int | None, meanwhile: Callable[[], None]) -> Writing:
        self.since_ns.append(since_ns)
        end_s = time.monotonic() + 60
        while not self.may_go_on.is_set() and time.monotonic() < end_s:
            self.has_begun.set()
            meanwhile()
            time.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        return lambda: 0


def owed_ns(path: Path) -> int | None:
    """Return since when a store says that events are owed an analysis."""
    with Store.open(path) as store:
        found = store.select("SELECT value::BIGINT FROM run WHERE name = $owed", {"owed": OWED}).values
    return int(found[0][0]) if found else None


def first_ns(path: Path, number: int) -> int:
    """Return when the event of that number happened."""
    with Store.open(path) as store:
        sql = "SELECT t_ns FROM event WHERE stage = 'step.started' AND a = $a"
        return int(store.select(sql, {"a": number}).values[0][0])


@pytest.mark.parametrize("failure", [None, ValueError("no luck")], ids=["ends", "fails"])
def test_a_snapshot_does_not_wait_for_an_analysis_that_has_no_processor(
    spool: Path, output: Path, failure: Exception | None
) -> None:
    """What came meanwhile is analysed next; all of it, should the one that was under way fail or be killed."""
    slow, alive = Slow(failure), emit.Emitter(spool)
    with Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=slow) as recorder:
        recorder.start()
        try:
            alive.emit(STEP, "r", 0)
            assert slow.has_begun.wait(60)
            for number in (1, 2):
                alive.emit(STEP, "r", number)
                until(lambda number=number: number in numbers(output))
            (old_ns,), new_ns = slow.since_ns, first_ns(output, 1)
            assert old_ns is not None
            assert old_ns <= first_ns(output, 0) < new_ns
            assert owed_ns(output) == old_ns
        finally:
            slow.may_go_on.set()
        until(lambda: len(slow.since_ns) > 1)
        assert slow.since_ns[1] == (new_ns if failure is None else old_ns)
        if failure is None:
            until(lambda: owed_ns(output) is None)
        alive.close()
    assert numbers(output) == [0, 1, 2]


def test_a_snapshot_that_fails_meanwhile_costs_no_answers(
    spool: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, but not at every turn that the analysis gives."""
    publish, failed = Store.publish, []
    slow, alive = Slow(), emit.Emitter(spool)

    def flaky(store: Store, target: Path, *, whole: bool = True) -> Extent | None:
        if slow.may_go_on.is_set() or not slow.has_begun.is_set():
            return publish(store, target, whole=whole)
        failed.append(time.monotonic())
        raise StoreError("no space")

    monkeypatch.setattr(Store, "publish", flaky)
    with Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=slow) as recorder:
        recorder.start()
        alive.emit(STEP, "r", 0)
        assert slow.has_begun.wait(60)
        until(lambda: len(failed) >= 3)
        slow.may_go_on.set()
        until(lambda: owed_ns(output) is None)
        alive.close()

    assert min(later - earlier for earlier, later in itertools.pairwise(failed)) > 0.1
    assert "no space" in " ".join(recorder.stats.messages)
    assert "analysis" not in " ".join(recorder.stats.messages)


def test_a_backlog_owes_what_is_under_way_and_what_came_meanwhile(tmp_path: Path) -> None:
    backlog = Backlog()

    def came(store: Store, t_ns: int) -> None:
        backlog.owe(store, t_ns)
        backlog.came(t_ns)

    def said(store: Store) -> list[int]:
        return [int(row["value"]) for row in store.rows("FROM run WHERE name = $owed", {"owed": OWED})]

    with Store.open(tmp_path / "run.duckdb", "write") as store:
        came(store, 20)
        came(store, 30)
        assert (backlog.since_ns, said(store)) == (20, [20])
        with backlog.under_way():
            came(store, 50)
            came(store, 40)  # another process's, which was read later
            assert (backlog.since_ns, said(store)) == (40, [20])
            backlog.settle(store)
        assert (backlog.since_ns, said(store)) == (40, [40])

        def failing() -> None:
            with backlog.under_way():
                came(store, 60)
                raise ValueError("no luck")

        with pytest.raises(ValueError, match="no luck"):
            failing()
        assert (backlog.since_ns, said(store)) == (40, [40])
        with backlog.under_way():
            backlog.settle(store)
        assert (backlog.since_ns, said(store)) == (None, [])
