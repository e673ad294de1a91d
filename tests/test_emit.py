"""The emit side from a host's view: what emit() returned from is in the spool, and nothing comes back as an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace import emit, spool, stages, wire
from tests import spooled
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENQUEUED = stages.PREFILL_ENQUEUED.code
STEP = stages.STEP_STARTED.code


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[emit.Emitter]:
    tracer = emit.Emitter(tmp_path)
    yield tracer
    tracer.close()


def test_an_event_comes_back_as_it_was_emitted(tracer: emit.Emitter, tmp_path: Path) -> None:
    tracer.emit(ENQUEUED, "cmpl-1", 1, -2, 3, 2**62, "decode-1", 1_000)
    before_ns = time.monotonic_ns()
    tracer.emit(STEP, a=7)

    event, now = spooled.read(tmp_path).of(ENQUEUED)[0], spooled.read(tmp_path).of(STEP)[0]
    assert event == spooled.Event(ENQUEUED, "cmpl-1", (1, -2, 3, 2**62), "decode-1", 1_000)
    assert now.numbers == (7, 0, 0, 0)
    assert (now.request, now.ref) == ("", "")
    assert before_ns <= now.t_ns <= time.monotonic_ns()


numbers = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(
    st.text(max_size=100), numbers, numbers, numbers, numbers, st.text(max_size=100), st.integers(1, 2**63 - 1),
), max_size=30))  # fmt: skip
def test_any_events_come_back(tmp_path_factory: pytest.TempPathFactory, events: list[tuple[Any, ...]]) -> None:
    folder = tmp_path_factory.mktemp("spool")
    tracer = emit.Emitter(folder)
    for event in events:
        tracer.emit(ENQUEUED, *event)
    found = spooled.read(folder)
    tracer.close()

    assert events == [(e.request, *e.numbers, e.ref, e.t_ns) for e in found.of(ENQUEUED)]
    assert found.unfinished == 0


@pytest.mark.parametrize("text", ["", "\0", "a\nb\x1b[0m", "é" * 50, "𝄞" * 1000, "x" * 1024, "x" * 4096])
def test_any_string_comes_back(tracer: emit.Emitter, tmp_path: Path, text: str) -> None:
    tracer.emit(ENQUEUED, text, ref=text)

    event = spooled.read(tmp_path).of(ENQUEUED)[0]
    assert (event.request, event.ref) == (text, text)


def test_a_string_that_no_store_takes_is_spelt_out(tracer: emit.Emitter, tmp_path: Path) -> None:
    tracer.emit(ENQUEUED, "a\ud800b")
    tracer.emit(ENQUEUED, "x" * 100_000)

    spelt, cut = (event.request for event in spooled.read(tmp_path).of(ENQUEUED))
    assert spelt == "a\\ud800b"
    assert len(cut.encode()) == wire.TEXT_BYTES_MAX
    assert cut.startswith("xxxx")


def test_odd_values_are_taken_as_well_as_they_can_be(tracer: emit.Emitter, tmp_path: Path) -> None:
    for odd in ({"a": 2**70}, {"a": -(2**70)}, {"a": 1.9}, {"a": None}, {"a": float("nan")}, {"a": "x"}, {"a": True}):
        tracer.emit(ENQUEUED, "r", **odd)
    tracer.emit(ENQUEUED, None, ref=17, t_ns=-5)
    tracer.emit(ENQUEUED, ["r"], ref=b"x")
    tracer.emit(2**20, "r")

    events = spooled.read(tmp_path).of(ENQUEUED)
    assert [e.numbers[0] for e in events[:7]] == [2**63 - 1, -(2**63), 1, 0, 0, 0, 1]
    assert [(e.request, e.ref) for e in events[7:]] == [("", "17"), ("['r']", "b'x'")]
    assert all(e.t_ns > 0 for e in events)
    assert spooled.read(tmp_path).dropped == {wire.DROPS_COUNT - 1: 1}, "no stage has that code"
    assert tracer.enabled


def test_a_value_that_raises_switches_tracing_off_and_says_so_once(
    tracer: emit.Emitter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile:
        def __hash__(self) -> int:
            raise RuntimeError("no hash")

        __str__ = __hash__

    with caplog.at_level(logging.WARNING, "kvtrace"):
        tracer.emit(ENQUEUED, Hostile())
        tracer.emit(ENQUEUED, Hostile())
        tracer.disable("hook", "again")

    assert not tracer.enabled
    assert [record.name for record in caplog.records] == ["kvtrace"]
    (record,) = spooled.read(tmp_path).of(stages.DISABLED.code)
    assert record.ref == "emit: RuntimeError: no hash"


def test_after_disable_nothing_more_is_recorded(tracer: emit.Emitter, tmp_path: Path) -> None:
    tracer.emit(ENQUEUED, "before")
    tracer.disable("hook build_connector_meta", ValueError("boom"))
    tracer.emit(ENQUEUED, "after")
    tracer.fact("kind", "core")
    tracer.flush()

    found = spooled.read(tmp_path)
    assert [event.request for event in found.of(ENQUEUED)] == ["before"]
    assert [event.ref for event in found.of(stages.DISABLED.code)] == ["hook build_connector_meta: ValueError: boom"]
    assert found.dropped == {}


def test_facts_stand_in_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "PRESSED_NS", 0)
    monkeypatch.setattr(spool, "ROTATE_BYTES", 0)
    monkeypatch.setattr(spool, "RESERVE_BYTES_MAX", spool.FIRST_BYTES)
    tracer = emit.Emitter(tmp_path)
    tracer.fact("kind", "core")
    for number in range(10_000):
        tracer.emit(STEP, a=number)
        if number % 1000 == 0:
            tracer.flush()
    tracer.fact("role", "kv_producer")
    tracer.flush()

    files = sorted(tmp_path.glob("*.kvt"))
    assert len(files) >= 3
    assert all(spooled.read([path]).facts["kind"] == "core" for path in files)
    assert spooled.read(files[-1:]).facts == {"kind": "core", "role": "kv_producer"}
    tracer.close()


def test_threads_do_not_disturb_each_other(tracer: emit.Emitter, tmp_path: Path) -> None:
    def work(thread: int) -> None:
        for number in range(10_000):
            tracer.emit(ENQUEUED + thread, f"r{thread}-{number // 25}", number, thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = spooled.read(tmp_path)
    for thread in range(4):
        events = found.of(ENQUEUED + thread)
        lost = found.dropped.get(ENQUEUED + thread, 0)
        assert len(events) + lost == 10_000
        assert all(event.request == f"r{thread}-{event.numbers[0] // 25}" for event in events)
        assert all(event.numbers[1] == thread for event in events)


def test_there_is_an_anchor_at_once_and_every_second(tracer: emit.Emitter, tmp_path: Path) -> None:
    def anchors() -> list[spooled.Event]:
        return spooled.read(tmp_path).of(stages.ANCHOR.code)

    at_once = len(anchors())
    until(lambda: len(anchors()) >= at_once + 2, what="two more are written")

    assert at_once
    offsets = [anchor.numbers[0] - anchor.t_ns for anchor in anchors()]
    assert max(offsets) - min(offsets) < 50_000_000


def test_it_is_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(emit.SPOOL_VARIABLE, raising=False)
    tracer = emit._from_environment()

    assert not tracer.enabled
    assert tracer.emit(ENQUEUED, "r", 1, ref="x") is None
    tracer.fact("kind", "core")
    tracer.disable("x", "y")
    tracer.flush()
    tracer.close()


def test_an_unusable_folder_switches_it_off_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(emit.SPOOL_VARIABLE, str(tmp_path / "file" / "spool"))
    with caplog.at_level(logging.WARNING, "kvtrace"):
        tracer = emit._from_environment()

    assert not tracer.enabled
    assert len(caplog.records) == 1
    assert str(tmp_path / "file" / "spool") in caplog.text


def test_a_missing_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emit.SPOOL_VARIABLE, str(tmp_path / "a" / "b"))
    tracer = emit._from_environment()
    tracer.emit(ENQUEUED, "r")

    assert [event.request for event in spooled.read(tmp_path / "a" / "b").of(ENQUEUED)] == ["r"]
    tracer.close()


def test_a_folder_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(emit.SPOOL_VARIABLE, "spool")
    tracer = emit._from_environment()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tracer.emit(ENQUEUED, "r")
    tracer.flush()

    assert [event.request for event in spooled.read(tmp_path / "spool").of(ENQUEUED)] == ["r"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    tracer.close()


@pytest.mark.parametrize(
    ("text", "budget_bytes"), [("", spool.BUDGET_BYTES), ("1000000", 10**6), ("1e6", 10**6), ("x", spool.BUDGET_BYTES)]
)
def test_the_budget_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, budget_bytes: int) -> None:
    monkeypatch.setenv(emit.BUDGET_VARIABLE, text)

    assert emit._budget_bytes() == budget_bytes


def test_a_process_that_only_idles_stays_small(tmp_path: Path) -> None:
    tracer = emit.Emitter(tmp_path)
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    tracer.close()

    assert used <= spool.FIRST_BYTES + spool.RESERVE_BYTES_MAX + 65_536


def test_the_log_hears_of_trouble_whatever_level_the_host_sets(tmp_path: Path) -> None:
    script = (
        "import logging\nfrom kvtrace import emit\nlogging.getLogger().setLevel(logging.ERROR)\n"
        "emit.tracer().disable('here', 'broken')"
    )
    environment = {**os.environ, emit.SPOOL_VARIABLE: str(tmp_path / "other")}

    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert "switched itself off" in ended.stderr


def test_room_that_comes_and_goes_is_said_once_a_minute(tracer: emit.Emitter, caplog: pytest.LogCaptureFixture) -> None:
    drops, again = "kvtrace drops and counts events", "kvtrace records again"
    for _ in range(5):
        tracer.fail(OSError("full"))
        tracer._spool.leave()
        tracer._grow()
    tracer.fail(OSError("full"))
    early = [record.getMessage().split(" in ")[0] for record in caplog.records]

    tracer._may_say_ns = time.monotonic_ns()  # a minute later, while it lasts
    tracer.fail(OSError("full"))
    tracer.fail(OSError("full"))

    assert early == [drops, again]
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [drops, again, drops]
