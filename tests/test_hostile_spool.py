"""Spool files that no engine wrote: what they hold costs its own records, and no other request its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtrace import analyze, cli, stages
from kvtrace.collect import convert
from kvtrace.collect.amounts import are_possible
from kvtrace.schema.amounts import impossible
from kvtrace.segments import RECORD, SegmentFile
from kvtrace.spool import SEGMENT_BYTES_MAX
from kvtrace.stages import Stage
from kvtrace.store import Store, working_path
from kvtrace.wire import HEADER_BYTES, LATEST_NS, RECORD_BYTES
from tests import emitted, spooled
from tests.recordings import STEP, record_once
from tests.trace import D, P, push

LEAST, MOST = -(2**63), 2**63 - 1
SAID = "holds amounts that nothing has, in 1 record or more, which were left out"


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.mark.parametrize(
    ("stage", "process", "payload"),
    [
        (stages.DECODE_FINISHED, D, (LEAST,)),
        (stages.DECODE_ENQUEUED, D, (0, 0, 0, LEAST)),
        (stages.PREFILL_ENQUEUED, P, (MOST,)),
        (stages.STEP_ENDED, P, (1, LEAST)),
        (stages.POST_ENDED, P, (7, MOST, MOST)),
        (stages.TRANSFER_DONE, P, (7, MOST)),
        (stages.STEP_CONNECTED, D, (1, 0, MOST, LEAST)),
    ],
)
def test_an_amount_that_nothing_has_costs_its_record_alone(
    tmp_path: Path, stage: Stage, process: int, payload: tuple[int, ...]
) -> None:
    """One such number kept every request of the store from being analysed, or from being walked in SQL."""
    emitted.emit(tmp_path / "spool", push(name="whole").at(70, stage, "hostile", *payload, process=process))
    recorder = record_once(tmp_path / "run.duckdb", tmp_path / "spool", analysis=analyze.worked_out)

    assert [said.partition(".kvt: ")[2] for said in recorder.stats.messages] == [SAID]
    with Store.open(tmp_path / "run.duckdb") as store:
        (answer,) = store.rows("SELECT ttft_ns, verdict FROM request WHERE request_id = 'whole'")
        (walked,) = store.rows("SELECT ttft_ns, unwalked FROM walk_request WHERE request_id = 'whole'")
        assert store.rows("SELECT count(*) AS n FROM event WHERE request = 'hostile'") == [{"n": 0}]
    assert answer["verdict"] == "complete"
    assert walked == {"ttft_ns": answer["ttft_ns"], "unwalked": None}


def test_large_amounts_that_something_has_are_taken_in() -> None:
    """Clocks, ids of traces, checksums and what a slot without a meaning holds are no amounts."""
    wall_ns, uptime_ns, day_ns = 1_800_000_000_000_000_000, 1 << 58, 86_400_000_000_000
    said = [
        (stages.ANCHOR, wall_ns, 50, 0, 0),
        (stages.PREFILL_ENQUEUED, 1 << 20, wall_ns, 0, 400 * day_ns),
        (stages.TRANSFER_DONE, 1 << 40, uptime_ns, 3, 0),
        (stages.ROUTER_TRACED, LEAST, MOST, LEAST, MOST),
        (stages.PREFILL_CHECKED, 0, 5, (1 << 32) - 1, 1 << 40),
        (stages.SENDER_WOKE, 400 * day_ns, 0, 0, 0),
        (stages.READY, MOST, LEAST, MOST, LEAST),
    ]
    records = np.zeros(len(said), RECORD)
    for at, (stage, *payload) in enumerate(said):
        records[at] = (1, *payload, 0, 0, stage.code, b"", 0)

    assert are_possible(records).all()


def test_in_a_store_the_same_amounts_are_impossible(tmp_path: Path) -> None:
    """The condition in SQL agrees with the one about records, at its bounds and beyond."""
    edges = [1 << bits for bits in (31, 40, 48, 53, 56, 60)] + [LATEST_NS, MOST]
    values = [0, *(near for edge in edges for near in (edge - 1, min(edge, MOST), ~edge, -edge, min(edge + 1, MOST)))]
    rows = [(stage, slot, value) for stage in stages.STAGES for slot in range(4) for value in (*values, LEAST)]
    records = np.zeros(len(rows), RECORD)
    for at, (stage, slot, value) in enumerate(rows):
        records[at]["t_ns"], records[at]["code"], records[at]["abcd"[slot]] = 1 + at, stage.code, value
    possible = are_possible(records)
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        with_all = convert.to_events(records, {}, 0, 0).events
        assert with_all.num_rows == np.count_nonzero(possible)
        store.append("event", convert._table(records, convert._INDEX_OF_CODE[records["code"]], {}, 0, 0))
        sql = f"SELECT t_ns - 1 FROM event WHERE NOT {impossible()} ORDER BY t_ns"  # noqa: S608 -- a constant
        found = store.select(sql).values

    assert [at for (at,) in found] == np.flatnonzero(possible).tolist()
    assert 0 < np.count_nonzero(possible) < len(rows)


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store of a kvtrace that took such an amount in, and therefore could not answer for any request."""
    emitted.emit(tmp_path / "spool", push(name="whole").at(70, stages.TRANSFER_DONE, "hostile", 7, MOST, process=P))
    with monkeypatch.context() as earlier:
        earlier.setattr(convert, "are_possible", lambda records: np.ones(len(records), np.bool_))
        recorder = record_once(tmp_path / "run.duckdb", tmp_path / "spool", analysis=analyze.worked_out)
    (said,) = recorder.stats.messages
    assert "analysis: failed" in said
    return tmp_path / "run.duckdb"


def requests(path: Path) -> list[dict[str, Any]]:
    """Return what the store says of its requests, by the reference and in SQL."""
    with Store.open(path) as store:
        return store.rows(
            "SELECT request_id, verdict, w.unwalked FROM request JOIN walk_request AS w USING (request_id)"
        )


WHOLE = [{"request_id": "whole", "verdict": "complete", "unwalked": None}]


def test_a_store_that_holds_such_an_amount_is_upgraded(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who reads it is told how, and it is said what was left out; nothing remains to be done."""
    assert cli.main(["explain", str(filled)]) == 1
    assert f"amounts that nothing has in 1 event: `kvtrace upgrade {filled}`" in capsys.readouterr().err

    assert cli.main(["upgrade", str(filled)]) == 0

    out, err = capsys.readouterr()
    assert f"{filled} held amounts that nothing has, in 1 event, which was left out" in err
    assert "1 request worked out again" in out
    assert requests(filled) == WHOLE
    assert cli.main(["upgrade", str(filled)]) == 0
    assert "nothing to upgrade" in capsys.readouterr().out


def test_a_recording_of_such_an_amount_that_broke_off_goes_on_without_it(tmp_path: Path, filled: Path) -> None:
    filled.rename(working_path(filled))
    recorder = record_once(filled, tmp_path / "spool", analysis=analyze.worked_out)

    assert f"{filled}: held amounts that nothing has, in 1 event, which was left out" in recorder.stats.messages
    assert requests(filled) == WHOLE


@pytest.mark.parametrize("ranks", ["many", "-2", "2.5", "9" * 5000, str(2**40)])
def test_a_number_of_ranks_that_is_none_costs_no_answer(tmp_path: Path, ranks: str, monkeypatch: Any) -> None:
    """One such fact of one process kept every request of the store from being analysed."""
    monkeypatch.setitem(emitted.FACTS, D, {**emitted.FACTS[D], "tp_size": ranks})
    emitted.emit(tmp_path / "spool", push(name="whole"))
    recorder = record_once(tmp_path / "run.duckdb", tmp_path / "spool", analysis=analyze.worked_out)

    assert recorder.stats.messages == []
    with Store.open(tmp_path / "run.duckdb") as store:
        assert store.rows("SELECT request_id, verdict FROM request") == [{"request_id": "whole", "verdict": "complete"}]


def test_a_file_that_is_a_hole_of_a_gigabyte_is_read_no_further_than_a_file_can_hold(spool: Path) -> None:
    """Of a process that has ended; with a record at its end it took the memory of a number for each slot."""
    spooled.run(f"tracer.emit({STEP}, 'r0', 1)", spool)
    path = min(spool.glob("*.kvt"))
    capacity = SEGMENT_BYTES_MAX // RECORD_BYTES
    beyond = HEADER_BYTES + (capacity + 16_000_000) * RECORD_BYTES
    record = np.zeros(1, RECORD)
    record["t_ns"], record["code"], record["commit"] = 1, STEP, beyond
    with path.open("r+b") as hole:
        hole.seek(beyond)
        hole.write(record.tobytes())
    file = SegmentFile.open(path)
    batch = file.poll()

    assert batch.records["a"].tolist()[-1] == 1
    assert file.consumed <= capacity
    assert len(file.holes) == 0
    file.close()
