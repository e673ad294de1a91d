"""When a recorder publishes: within its part of a processor, again after a failure, copies beside the store."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import emit
from kvtrace.collect import Recorder, conclusions
from kvtrace.errors import StoreError
from kvtrace.store import Store
from tests.recordings import STEP, at_once, numbers, record_once, write
from tests.waiting import until

if TYPE_CHECKING:
    from kvtrace.store.publication import Extent


def test_a_copy_that_cannot_be_put_in_place_costs_the_recording_nothing(spool: Path, output: Path) -> None:
    write(spool, 0, 10)
    copy = output.with_name("copy.duckdb")
    copy.with_name("copy.duckdb.spare").mkdir()  # in the way of what is kept beside the copy
    recorder = record_once(output, spool, copies=[copy])

    assert numbers(output) == list(range(10))
    assert recorder.stats.removed_files
    assert any("copy.duckdb" in message for message in recorder.stats.messages)


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
        until(lambda: alive.emit(STEP, "r", 1) or recorder.stats.published >= 4)
        with output.with_name("run.duckdb.spare").open("rb"):
            until(lambda: alive.emit(STEP, "r", 1) or recorder._pace.is_refused)
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
