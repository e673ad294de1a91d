"""When snapshots are published, and what that may cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from kvtrace.collect import publishing
from kvtrace.collect.publishing import SHARE, Pace, Work

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrace.store import Store


class Clock:
    """Time that passes when told; a publication takes processor time too."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.spent_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.spent_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)


class Copied:
    """A store whose copies cost what is said; `is_held` while somebody reads what would be brought up to date."""

    def __init__(self, clock: Clock, whole_s: float, changed_s: float) -> None:
        self.clock, self.cost_s = clock, {"whole": whole_s, "changed": changed_s}
        self.is_held, self.is_first = False, True
        self.done: list[str] = []

    def publish(self, _target: Path, *, whole: bool) -> str | None:
        extent = "whole" if self.is_held or self.is_first else "changed"
        if extent == "whole" and not whole:
            return None
        self.is_first = False
        self.clock.now_s += self.cost_s[extent]
        self.clock.spent_s += self.cost_s[extent]
        self.done.append(extent)
        return extent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(publishing, "time", clock)
    return clock


def follow(pace: Pace, store: Copied, clock: Clock, seconds: float, work_s: float = 0.0, waited_s: float = 0.0) -> int:
    """Publish whenever it is time, after work that takes so much processor time, which does not count as publishing.

    And waits for so long for a processor. Return how often that was.
    """
    end_s, tries = clock.now_s + seconds, 0
    while clock.now_s < end_s:
        if pace.is_due:
            clock.now_s += work_s + waited_s
            tries += 1
            pace.publish(cast("Store", store), work=Work(work_s + waited_s, work_s))
        clock.now_s += 0.25
    return tries


def test_small_changes_are_published_at_the_interval(clock: Clock, tmp_path: Path) -> None:
    store = Copied(clock, 0.1, 0.01)
    follow(Pace(tmp_path / "run.duckdb", 2.0), store, clock, 60)

    assert 26 <= len(store.done) <= 31
    assert store.done[0] == "whole"


@pytest.mark.parametrize(("changed_s", "work_s", "least"), [(0.01, 0.0, 28), (0.3, 1.2, 19), (0.01, 4.0, 9)])
def test_the_work_before_a_publication_delays_it_only_where_it_would_take_more_than_half_the_time(
    clock: Clock, tmp_path: Path, changed_s: float, work_s: float, least: int
) -> None:
    store = Copied(clock, changed_s, changed_s)
    follow(Pace(tmp_path / "run.duckdb", 2.0), store, clock, 60, work_s)

    assert least <= len(store.done) <= least + 3
    assert clock.spent_s <= SHARE * 60 + changed_s
    assert len(store.done) * min(work_s, 2.0) <= 30 + work_s


def test_work_that_waits_for_a_processor_rests_the_less_behind_it(clock: Clock, tmp_path: Path) -> None:
    """Of half a processor it has had less than its part, so the next snapshot's begins at the next look."""
    store = Copied(clock, 0.01, 0.01)
    follow(Pace(tmp_path / "run.duckdb", 2.0), store, clock, 60, work_s=1.0, waited_s=2.5)

    assert 60 / (3.5 + 0.01 + 2 * 0.25) <= len(store.done) <= 60 / 3.5 + 1


def test_a_snapshot_is_late_once_it_is_long_due_and_paid_for(clock: Clock, tmp_path: Path) -> None:
    store = Copied(clock, 4.0, 0.01)
    pace = Pace(tmp_path / "run.duckdb", 2.0)
    assert not pace.is_late
    pace.publish(cast("Store", store))
    clock.now_s += 60
    assert not pace.is_late  # the next one may be whole too, for which it is too much to be saved up
    pace.publish(cast("Store", store))
    clock.now_s += 2.4
    assert not pace.is_late
    clock.now_s += 0.2
    assert pace.is_late
    pace.pause(1.0)
    assert not pace.is_late

    store.cost_s["changed"] = 0.9
    clock.now_s += 10
    pace.publish(cast("Store", store))
    clock.now_s += 2.6
    assert not pace.is_late  # the next one may cost as much
    clock.now_s += 5.0
    assert pace.is_late


@pytest.mark.parametrize("whole_s", [0.5, 4.0])
def test_publishing_stays_within_its_share_whoever_reads(clock: Clock, tmp_path: Path, whole_s: float) -> None:
    """A reader that sits on every snapshot makes each copy a whole one: then they come as rarely as they cost."""
    store = Copied(clock, whole_s, 0.5)
    pace = Pace(tmp_path / "run.duckdb", 2.0)
    pace.publish(cast("Store", store))
    spent_s = clock.spent_s
    for is_held in (False, True, False, True, True):
        store.is_held = is_held
        follow(pace, store, clock, 120)

    assert {"whole", "changed"} == set(store.done)
    assert clock.spent_s - spent_s <= SHARE * 600 + whole_s


@pytest.mark.parametrize(("work_s", "most"), [(0.01, 120), (0.3, 75), (1.2, 26), (4.0, 11)])
def test_the_work_before_a_refused_publication_takes_no_more_of_the_time(
    clock: Clock, tmp_path: Path, work_s: float, most: int
) -> None:
    """Whoever holds the spare of a large store has the analysis of what is new come no oftener for it."""
    store = Copied(clock, 100.0, 0.01)
    pace = Pace(tmp_path / "run.duckdb", 2.0)
    pace.publish(cast("Store", store))
    store.is_held = True
    pace.publish(cast("Store", store))
    tries = follow(pace, store, clock, 60, work_s)

    assert store.done == ["whole", "whole"]
    assert 0 < tries <= most
    assert tries * min(work_s, 2.0) <= 30 + work_s


def test_a_snapshot_that_costs_more_than_the_others_is_paid_for_by_them(clock: Clock, tmp_path: Path) -> None:
    """A checkpoint in ten merges rows and takes ten times as long: no snapshot comes later for it."""
    store = Copied(clock, 0.1, 0.05)
    pace = Pace(tmp_path / "run.duckdb", 2.0)
    for number in range(10):
        store.cost_s["changed"] = 0.05
        follow(pace, store, clock, 20)
        published, store.cost_s["changed"] = len(store.done), 0.7 if number else 0.05
        follow(pace, store, clock, 2.5)
        assert len(store.done) > published
        store.cost_s["changed"] = 0.05
        published = len(store.done)
        follow(pace, store, clock, 20)
        assert len(store.done) >= published + 8

    assert clock.spent_s <= SHARE * 425


def test_not_much_is_saved_up(clock: Clock, tmp_path: Path) -> None:
    store = Copied(clock, 0.1, 0.01)
    pace = Pace(tmp_path / "run.duckdb", 2.0)
    follow(pace, store, clock, 3600)
    spent_s, store.cost_s["changed"] = clock.spent_s, 0.6
    follow(pace, store, clock, 60)

    assert SHARE * 60 < clock.spent_s - spent_s <= SHARE * 60 + publishing._SAVED_S + 0.6


def test_what_must_be_published_is(clock: Clock, tmp_path: Path) -> None:
    store = Copied(clock, 4.0, 0.5)
    store.is_held = True
    pace = Pace(tmp_path / "run.duckdb", 2.0)

    assert pace.publish(cast("Store", store))
    assert pace.publish(cast("Store", store))  # so that from now on only what changes need be copied
    assert not pace.publish(cast("Store", store))
    assert pace.publish(cast("Store", store), at_any_cost=True)
