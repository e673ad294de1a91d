"""SQL answers for several ranks and transfers: the path is that of the one that was waited for, whichever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace import stages
from tests.field.scenes import D_LEG, P_LEG, changed, lacking
from tests.trace import MS, D, P, Trace, ns, pull, push
from tests.walk_compare import path_ms
from tests.walk_ranks import RANK_SPACING, Shape

if TYPE_CHECKING:
    from pathlib import Path

P1, D1 = P + RANK_SPACING, D + RANK_SPACING


def _read(trace: Trace, process: int, number: int, times_ms: tuple[float, ...], rank: int = 0) -> Trace:
    """Add a read of that process of D: prepared, begun and ended to be posted, seen done."""
    prepared, started, ended, done = times_ms
    trace.at(prepared, stages.PREPARED, D_LEG, number, 20, rank, ref=P_LEG, process=process)
    trace.at(started, stages.POST_STARTED, D_LEG, number, process=process)
    trace.at(ended, stages.POST_ENDED, D_LEG, number, 1_300_000, 20, process=process)
    return trace.at(done, stages.TRANSFER_DONE, D_LEG, number, process=process)


def _write(trace: Trace, process: int, number: int, times_ms: tuple[float, ...], rank: int = 0) -> Trace:
    """Add a write of that process of P: matched, prepared, begun and ended to be posted, seen done."""
    matched, *times = times_ms
    trace.at(matched, stages.MATCHED, P_LEG, rank, ref=D_LEG, process=process)
    for stage, at_ms, payload in zip(
        (stages.PREPARED, stages.POST_STARTED, stages.POST_ENDED, stages.TRANSFER_DONE), times,
        ((20, rank), (), (1_300_000, 20), ()), strict=True,
    ):  # fmt: skip
        trace.at(at_ms, stage, P_LEG, number, *payload, ref=D_LEG if payload == (20, rank) else "", process=process)
    return trace


def _two_reads() -> Trace:
    """Return a pull of two ranks of D: the second loads from 38.2 on, sees its KV at 63 and reports at 64."""
    trace = pull().shifted(44.5, 20).at(38.2, stages.LOAD_STARTED, D_LEG, 1, 38, process=D1)
    _read(trace, D1, 3, (38.6, 39.2, 41, 63), rank=1)
    return trace.at(64, stages.REPORTED, D_LEG, 1, process=D1)


def _two_writes() -> Trace:
    """Return a push of two ranks a side: rank 0 is told of its write at 52, rank 1 at 62, which reports at 64."""
    trace = changed(push().shifted(41.5, 20), stages.NOTIFIED, t_ns=ns(52))
    trace.at(32, stages.SENDER_WOKE, process=P1).at(90, stages.SENDER_SLEPT, process=P1)
    trace.at(33, stages.PREFILL_STAGED, P_LEG, 1, process=P1).at(34.5, stages.SENDER_PICKED, P_LEG, 1, process=P1)
    _write(trace, P1, 3, (35.2, 35.7, 36.2, 39, 63), rank=1)
    return trace.at(62, stages.NOTIFIED, D_LEG, 1, process=D1).at(64, stages.REPORTED, D_LEG, 1, process=D1)


def test_the_path_is_the_last_ranks_that_reads(tmp_path: Path) -> None:
    """Two ranks of D read for themselves. The pair's fastest read took 4 ms, so the last one's KV was there at 43.2."""
    assert path_ms(tmp_path, _two_reads(), 37, 65, Shape(1, 2)) == [
        (37, 38.2, "submit.wait"), (38.2, 39.2, "prepare"), (39.2, 41, "post"), (41, 43.2, "wire"),
        (43.2, 63, "detection"), (63, 65, "report"),
    ]  # fmt: skip


def test_what_another_rank_read_is_not_what_the_last_one_waited_for(tmp_path: Path) -> None:
    """Of rank 1, the last to report, no read was recorded: it loads from 38.2 on and reports at 64."""
    trace = lacking(_two_reads(), lambda event: event.process == D1 and event.stage.startswith("transfer."))

    assert path_ms(tmp_path, trace, 37, 65, Shape(1, 2)) == [
        (37, 38.2, "submit.wait"), (38.2, 64, "unattributed"), (64, 65, "report")
    ]  # fmt: skip


def test_the_path_is_the_last_ranks_that_is_written_to(tmp_path: Path) -> None:
    """Rank 0 matches and posts late and is told after 6 ms; rank 1, posted at 36.2, is told at 62 and the last."""
    trace = changed(_two_writes(), stages.MATCHED, lambda event: event.a == 0, t_ns=ns(45))
    for stage, at_ms in ((stages.PREPARED, 45.5), (stages.POST_STARTED, 46), (stages.POST_ENDED, 47)):
        trace = changed(trace, stage, lambda event: event.a == 7, t_ns=ns(at_ms))

    assert path_ms(tmp_path, trace, 31, 65, Shape(2, 2)) == [
        (31, 33, "stage.wait"), (33, 35.2, "writer.busy"), (35.2, 36.2, "prepare"), (36.2, 39, "post"),
        (39, 42.2, "wire"), (42.2, 62, "detection"), (62, 65, "report"),
    ]  # fmt: skip


def test_a_rank_whose_write_was_not_recorded_leaves_that_time_to_nobody(tmp_path: Path) -> None:
    """D's rank 1 was told at 62 of a write of which nothing was seen: rank 0's, matched at 35, explains none of it."""
    trace = lacking(_two_writes(), lambda event: event.process == P1)

    assert path_ms(tmp_path, trace, 33, 65, Shape(2, 2)) == [
        (33, 33.5, "writer.wake"), (33.5, 35, "writer.busy"), (35, 62, "unattributed"), (62, 65, "report")
    ]  # fmt: skip


def test_a_rank_that_reads_twice_waits_for_the_later_read(tmp_path: Path) -> None:
    """One rank of D reads from two of P; for 5 of the 6 ms before it saw the second one done it had no processor."""
    trace = _read(pull().shifted(43.4, 20), D, 8, (41, 42, 44, 62))
    trace.at(43, stages.NOTICE_STARVED, D_LEG, 0, MS, MS, process=D)
    trace.at(62, stages.NOTICE_STARVED, D_LEG, 0, 5 * MS, 6 * MS, process=D)
    trace.at(44, stages.POST_STARVED, D_LEG, 8, MS // 2, process=D).at(40, stages.POST_STARVED, D_LEG, 7, MS, process=D)

    assert path_ms(tmp_path, trace, 37, 65, Shape(2, 1)) == [
        (37, 38, "submit.wait"), (38, 42, "prepare"), (42, 43.5, "post"), (43.5, 44, "processor.wait"),
        (44, 46, "wire"), (46, 57, "detection"), (57, 62, "processor.wait"), (62, 65, "report"),
    ]  # fmt: skip


def _to_two_ranks() -> Trace:
    """Return a push of one rank of P to two of D, told at 42 and 50: the writes begin at 36 and 38.5."""
    trace = _write(push().shifted(43.5, 10), P, 8, (36, 38.2, 38.5, 40, 51))
    trace.at(50, stages.NOTIFIED, D_LEG, 1, process=D1)
    return trace.at(54.5, stages.REPORTED, D_LEG, 1, process=D1)


def test_a_rank_that_writes_twice_is_waited_for_until_the_last_write_is_told(tmp_path: Path) -> None:
    """Nobody says whose notification is whose. The first write was seen done at 43, 7 ms after its post began."""
    assert path_ms(tmp_path, _to_two_ranks(), 33.5, 55, Shape(1, 2)) == [
        (33.5, 36, "writer.busy"), (36, 38.5, "prepare"), (38.5, 40, "post"), (40, 45.5, "wire"),
        (45.5, 50, "detection"), (50, 55, "report"),
    ]  # fmt: skip


def test_a_write_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    """The second write fails at 39, so the first counts: 36..38, seen done at 43, told at last at 50."""
    trace = lacking(_to_two_ranks(), lambda event: (event.stage, event.a) == ("transfer.done", 8))
    trace.at(39, stages.TRANSFER_FAILED, P_LEG, 8, ref="NIXL_ERR_REMOTE_DISCONNECT", process=P)

    assert path_ms(tmp_path, trace, 33.5, 55, Shape(1, 2)) == [
        (33.5, 35, "writer.busy"), (35, 36, "prepare"), (36, 38, "post"), (38, 43, "wire"), (43, 50, "detection"),
        (50, 55, "report"),
    ]  # fmt: skip
