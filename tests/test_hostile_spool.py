"""Spool files that no engine wrote: what they hold costs its own records, and no other request its answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtrace import analyze, stages
from kvtrace.collect.amounts import are_possible
from kvtrace.segments import RECORD
from kvtrace.stages import Stage
from kvtrace.store import Store
from tests import emitted
from tests.recordings import record_once
from tests.trace import D, P, push

LEAST, MOST = -(2**63), 2**63 - 1
SAID = "holds amounts that nothing has, in 1 record or more, which were left out"


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
    recorder = record_once(tmp_path / "run.duckdb", tmp_path / "spool", analysis=analyze.analyze)

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
