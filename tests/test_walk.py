"""Two engines of attribution, one answer: SQL says of a request what the reference walk says, to the nanosecond.

SQL may decline a request, with a reason, and then gives no number at all; how many it may decline is part of the test.
"""

from __future__ import annotations

import json
import random
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kvtrace import critical_path, schema, stages
from kvtrace.errors import UsageError
from kvtrace.store import Store
from kvtrace.testing import Fleet, fill
from tests.dashboards import tools
from tests.walk_compare import compare, filled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCENES, REQUESTS = 56, 40
ANSWERED_LEAST = 0.6
"""The share of these untidy requests that SQL answers at least."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with filled(tmp_path_factory.mktemp("walk") / "many.duckdb", range(SCENES), REQUESTS) as store:
        yield store


def test_both_engines_agree_on_random_deployments(many: Store) -> None:
    """2,240 requests of 56 deployments: points missing, doubled, displaced, several ranks, push and pull."""
    assert compare(many) >= ANSWERED_LEAST


@pytest.mark.parametrize(
    ("sql", "least"),
    [
        ("stage IN ('prefill.enqueued', 'decode.enqueued') AND d >= 1000000 GROUP BY ALL", 0.5),
        ("stage IN ('prefill.scheduled', 'decode.scheduled') GROUP BY ALL HAVING count(*) > 1", 0.1),
        ("stage = 'transfer.post_started' GROUP BY ALL HAVING count(DISTINCT (process, a)) > 1", 0.6),
        ("stage = 'decode.reported' GROUP BY ALL HAVING count(DISTINCT process) > 1", 0.6),
    ],
    ids=("queue", "steps", "transfers", "ranks"),
)
def test_what_load_and_ranks_bring_is_answered(many: Store, sql: str, least: float) -> None:
    """Waits in a core's queue, several own steps, several ranks are no reason to decline, even if untidy as these."""
    rows = many.rows(
        f"""FROM walk_request SEMI JOIN (SELECT DISTINCT regexp_extract(request, 's[0-9]+-[0-9]+') AS request_id
  FROM (SELECT request FROM event WHERE {sql})) USING (request_id)"""  # noqa: S608 -- from above
    )

    assert len(rows) >= 100
    assert sum(row["walked"] for row in rows) / len(rows) >= least


def test_handshakes_are_answered(many: Store) -> None:
    (row,) = many.rows("SELECT count(DISTINCT request_id) AS n FROM walk_segment WHERE cause = 'handshake'")

    assert row["n"] >= 20


@pytest.mark.parametrize("seed", range(4))
def test_both_engines_agree_on_random_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Graphs of which random edges are gone, so that farther ancestors have to stand in."""
    rng = random.Random(seed)
    edges = [edge for edge in stages.EDGES if rng.random() > 0.15]
    incoming = {
        name: tuple(edge for edge in edges if edge.after.name == name) for name in {edge.after.name for edge in edges}
    }
    monkeypatch.setattr(critical_path, "_INCOMING", incoming)
    with filled(tmp_path / "graph.duckdb", range(100 + 4 * seed, 104 + 4 * seed), 25) as store:
        assert compare(store, edges) >= ANSWERED_LEAST / 2


@pytest.mark.parametrize(
    "given", [{"requests": -1}, {"pairs": 0}, {"per_s": 0.0}, {"push_share": 1.5}, {"odd_share": float("nan")}], ids=str
)
def test_a_fleet_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    (name,) = given

    with pytest.raises(UsageError, match=f"a fleet's {name} is"):
        Fleet(**{"requests": 1, **given})


def test_both_engines_agree_on_a_fleet(tmp_path: Path) -> None:
    """The traffic that the benchmarks use: SQL answers nearly all of it."""
    with Store.open(tmp_path / "fleet.duckdb", "write") as store:
        fill(store, Fleet(700, seed=3, odd_share=0.2, http=True))

        assert compare(store) >= 0.95


def test_the_views_answer_where_a_store_is_one_of_several(many: Store, tmp_path: Path) -> None:
    """Attached under a name, they read that store's tables and none of those beside it."""
    path = tmp_path / "copy.duckdb"
    many.publish(path)
    ask = "SELECT count(*), sum(coordination_ns)::BIGINT FROM {}walk_request"
    with Store.open(tmp_path / "other.duckdb", "write") as store:
        store.execute(f"ATTACH {schema.text(str(path))} AS far (READ_ONLY)")

        assert store.select(ask.format("far.")).values == many.select(ask.format("")).values
        assert store.select(ask.format("")).values == [(0, None)]


@pytest.mark.dashboards
def test_duckdb_1_reads_the_views_as_duckdb_2_does(many: Store, tmp_path: Path) -> None:
    path = tmp_path / "copy.duckdb"
    many.publish(path)
    asked = ["SELECT * FROM walk_request ORDER BY ALL", "SELECT * FROM walk_segment ORDER BY ALL"]
    code = """
import json, sys, duckdb
assert duckdb.__version__.startswith("1.5."), duckdb.__version__
connection = duckdb.connect(sys.argv[1], read_only=True)
connection.execute("SET enable_progress_bar = false")
print(json.dumps([connection.execute(sql).fetchall() for sql in sys.argv[2:]]))
"""
    done = subprocess.run(
        [tools.old_duckdb_python(), "-c", code, str(path), *asked], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[list(row) for row in many.select(sql).values] for sql in asked]


def test_a_fleet_is_the_same_every_time(tmp_path: Path) -> None:
    """One seed, one list of events; another seed, another."""
    found = []
    for seed in (1, 1, 2):
        with Store.open(tmp_path / f"{len(found)}.duckdb", "write") as store:
            fill(store, Fleet(200, seed=seed))
            found.append(store.rows("SELECT count(*) AS n, sum(hash(event))::VARCHAR AS print FROM event"))

    assert found[0] == found[1]
    assert found[0] != found[2]
