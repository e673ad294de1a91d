"""Many requests at once under one X-Request-Id, by push: each gets its own answer, and its own row."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrace.lab import workload
from tests.engine import programs
from tests.engine.deployment import Deployment

pytestmark = pytest.mark.engine

REQUESTS = 50
LOAD = {"requests": REQUESTS, "input_len": 100, "output_len": 8, "seed": 11, "quiet": True}


@pytest.mark.parametrize("mode", ["push"])
def test_one_client_id_at_once_hands_every_request_its_own_kv(deployment: Deployment, tmp_path: Path) -> None:
    """Every answer is the one that its prompt gets alone, and the store holds 50 complete requests of that id."""
    alone = workload.run(deployment.lab.url, rate_qps=1000.0, concurrency=1, **LOAD)
    together = workload.run(deployment.lab.url, rate_qps=float("inf"), client_id="same-id", **LOAD)
    store = tmp_path / "run.duckdb"
    programs.run(programs.kvtrace("record", "-o", store, "--spool", deployment.spool, "--once"))
    found = [request for request in programs.explained(store) if request["client_request_id"] == "same-id"]

    assert len(alone.completed) == len(together.completed) == REQUESTS
    assert len({record.token_ids for record in alone.records}) > REQUESTS * 0.9, "answers depend on the prompt"
    assert all(len(record.token_ids) == LOAD["output_len"] for record in alone.records)
    assert [record.token_ids for record in together.records] == [record.token_ids for record in alone.records]
    assert len(found) == len({request["request_id"] for request in found}) == REQUESTS
    assert {(request["verdict"], request["attempt"]) for request in found} == {("complete", 0)}
    for request in found:
        programs.assert_exact(request)
