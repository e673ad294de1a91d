"""The bench of tracing's own work times that work, and not the methods that are watched."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from instrumented_connectors.watch import watch
from tests import bench_observers
from tests.observer_site.sitecustomize import Times

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000


class Silent:
    """A tracer whose events cost nothing."""

    enabled = True

    def emit(self, *_: object, **__: object) -> None: ...

    def fact(self, *_: object) -> None: ...

    def disable(self, where: str, error: object) -> None:
        raise AssertionError(where, error)


class Inner:
    """Has a method that takes 40 ms."""

    def works(self) -> None:
        time.sleep(0.04)


class Outer:
    """Has a method that takes 20 ms and calls the other."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner

    def calls(self) -> int:
        time.sleep(0.02)
        self.inner.works()
        return 7


def rest(seconds: float) -> None:
    time.sleep(seconds)


def test_own_work_is_what_a_watched_call_takes_longer_than_its_method(tmp_path: Path) -> None:
    times, inner = Times(str(tmp_path)), Inner()
    outer = Outer(inner)
    timed = times.watched(watch)
    timed(inner, "works", Silent(), before=lambda: rest(0.005))
    timed(outer, "calls", Silent(), before=lambda: rest(0.001), after=lambda *_: rest(0.002))
    for _ in range(3):
        assert outer.calls() == 7

    found = bench_observers.spent(tmp_path, {os.getpid(): "P"})
    assert {key: calls for key, (calls, _) in found.items()} == {("P", "Inner.works"): 3, ("P", "Outer.calls"): 3}
    # Far from the 20 and 40 ms of the methods, and from each other's.
    assert 15 * MS <= found["P", "Inner.works"][1] < 15 * MS + 30 * MS
    assert 9 * MS <= found["P", "Outer.calls"][1] < 9 * MS + 30 * MS


def test_events_inside_own_work_count_once(tmp_path: Path) -> None:
    times, inner = Times(str(tmp_path)), Inner()
    emit = times.outermost("emit", lambda: rest(0.001))
    times.watched(watch)(inner, "works", Silent(), before=emit)
    inner.works()
    emit()
    found = bench_observers.spent(tmp_path, {os.getpid(): "D"})
    assert found["D", "emit"][0] == found["D", "Inner.works"][0] == 1


def test_processes_without_a_name_are_left_out(tmp_path: Path) -> None:
    Times(str(tmp_path)).add("emit", 5)
    assert bench_observers.spent(tmp_path, {}) == {}
