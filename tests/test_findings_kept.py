"""Findings in the store: the same as `explain` says, whoever wrote them, and as often as they are paid for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from kvtrace import analyze, cli, queries
from kvtrace.collect import Recorder, conclusions
from kvtrace.findings import table
from kvtrace.store import Store
from tests import import_records as records
from tests.field.scenes import unanswered
from tests.recordings import at_once, record_once, write
from tests.test_analyze import fill, process_row
from tests.test_findings import REQUESTS, _late, _posted, run_of
from tests.test_upgrade import write_older
from tests.trace import PROCESSES, START_NS, Trace, pull
from tests.waiting import until


def filled(store: Store, _since_ns: int | None) -> int:
    """Analyse a store as a recorder does, with late registrations by push and then slow posts by pull in it."""
    return worked_out(store, run_of(_late), run_of(lambda name: _posted(f"q{name}")).later(20_000, 10_000))


def worked_out(store: Store, *traces: Trace) -> int:
    """Analyse a store as a recorder does, with these traces in it."""
    store.execute("DELETE FROM process")  # that of a test which emits something
    rows = [process_row(process) for process in PROCESSES]
    store.append("process", pa.Table.from_pylist(rows, schema=store.arrow_schema("process")))
    if not store.rows("SELECT 1 FROM request"):
        for trace in traces:
            fill(store, trace)
    return analyze.analyze(store)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record_once(folder / "run.duckdb", folder / "spool", analysis=at_once(filled))
    return folder / "run.duckdb"


def found(path: Path, **given: str) -> list[dict[str, Any]]:
    """Return what query `findings` answers."""
    query = queries.load("findings")
    with Store.open(path) as store:
        return store.rows(query.sql, query.bind(given))


def test_the_store_says_what_explain_says(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same sentences and the same numbers, in the same order, in the query, in JSON and on the page."""
    assert cli.main(["explain", str(recorded), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["summary"]["findings"]
    assert cli.main(["explain", str(recorded)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    kept = found(recorded)

    assert [row["name"] for row in kept] == ["post.descriptors", "registration.late"]
    for rank, (row, one) in enumerate(zip(kept, told, strict=True), start=1):
        assert row["rank"] == rank
        same = {
            name: one[name] for name in ("name", "sentence", "grade", "stake_ns", "remedy", "query", "mode", "scope")
        }
        assert {name: row[name] for name in same} == same
        assert (row["class"], row["examples"], row["request_id"]) == (one["kind"], one["examples"], one["examples"][0])
        assert f"{rank}. {one['sentence']} ({one['grade']})" in page
        assert one["stake_ns"] > REQUESTS * 30_000_000


def test_a_finding_is_listed_where_a_request_of_its_kind_is_chosen(recorded: Path) -> None:
    late, posted = {"push": "registration.late"}, {"pull": "post.descriptors"}
    half_ns = str(START_NS + 19_000_000_000)

    def names(**given: str) -> dict[str, str]:
        return {row["mode"]: row["name"] for row in found(recorded, **given)}

    assert names() == {**late, **posted}
    assert names(mode="push") == late
    assert names(to_ns=half_ns, scope="router") == late
    assert names(from_ns=half_ns) == posted
    assert names(scope="client") == names(to_ns=str(START_NS)) == names(decode="nobody") == {}


def test_a_finding_of_the_whole_run_is_listed_with_any_request(tmp_path: Path) -> None:
    path = records.recorded(tmp_path / "run.duckdb", run_of(_late))
    with Store.open(path, "write") as store:
        store.execute("UPDATE process SET lost_records = 7 WHERE process = 1")
        assert table.write(store) == 2

    assert [row["name"] for row in found(path, mode="push")] == ["registration.late", "records.lost"]
    assert found(path, mode="pull") == []


def test_findings_are_written_while_recording_and_at_the_end(tmp_path: Path) -> None:
    output, spool = tmp_path / "run.duckdb", tmp_path / "spool"
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=at_once(filled))
    with recorder:
        recorder.start()
        write(spool, 0, 10, request="")
        until(lambda: len(found(output)) == 2)
        meanwhile = found(output)

    assert found(output) == meanwhile
    assert not recorder.stats.messages


def test_at_the_end_of_a_recording_nobody_is_under_way(tmp_path: Path) -> None:
    """Three requests without a first token may still get one while it goes on; then they are incomplete."""
    trace = run_of(lambda name: unanswered(pull(name)), count=3)
    record_once(
        tmp_path / "run.duckdb", tmp_path / "spool", analysis=at_once(lambda store, _since_ns: worked_out(store, trace))
    )

    assert [row["name"] for row in found(tmp_path / "run.duckdb")] == ["incomplete"]


def test_of_many_requests_the_newest_speak_while_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulls came last; at the end all are heard."""
    monkeypatch.setattr(conclusions, "NEWEST", REQUESTS)
    output, spool = tmp_path / "run.duckdb", tmp_path / "spool"
    recorder = Recorder(output, [spool], {}, publish_interval_s=0.05, analysis=at_once(filled))
    with recorder:
        recorder.start()
        write(spool, 0, 10, request="")
        until(lambda: bool(found(output)))
        (meanwhile,) = found(output)

    assert meanwhile["name"] == "post.descriptors"
    assert meanwhile["since"].timestamp() * 1e9 == START_NS + 20_000_000_000
    assert [row["name"] for row in found(output)] == ["post.descriptors", "registration.late"]
    assert {row["since"].timestamp() * 1e9 for row in found(output)} == {START_NS}


def test_a_failure_hides_no_request(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was hidden while the newest were looked at is there again."""
    path = Path(shutil.copy(recorded, tmp_path))

    def broken(opened: Store, _load: object) -> None:
        assert opened.select("SELECT count(*) FROM request").values == [(1,)]
        raise ZeroDivisionError

    monkeypatch.setattr(table.gather, "gather", broken)
    with Store.open(path, "write") as store:
        with pytest.raises(ZeroDivisionError), store.transaction():
            table.write(store, newest=1)
        assert store.select("SELECT count(*) FROM request").values == [(2 * REQUESTS,)]
    assert len(found(path)) == 2


def test_findings_that_fail_cost_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_store: Store, _newest: int) -> int:
        raise ZeroDivisionError("the sentence")

    monkeypatch.setattr(conclusions.table, "write", broken)
    recorder = record_once(tmp_path / "run.duckdb", tmp_path / "spool", analysis=at_once(filled))

    with Store.open(tmp_path / "run.duckdb") as store:
        assert store.select("SELECT count(*) FROM request").values == [(2 * REQUESTS,)]
    assert found(tmp_path / "run.duckdb") == []
    (said,) = recorder.stats.messages
    assert said == (
        "findings: failed at the end, so the store may hold older ones or none: ZeroDivisionError: the sentence"
    )
    with Store.open(tmp_path / "run.duckdb") as store:
        assert [said] == [f"{row['subject']}: {row['message']}" for row in store.rows("FROM recorder")]


def test_an_upgrade_and_an_import_write_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seven records lost in a process: that is said of a store of two hand-offs as well."""
    older = write_older(tmp_path / "run.duckdb", 4)
    fresh = records.recorded(tmp_path / "fresh.duckdb", run_of(_late, count=2))
    for path in (older, fresh):
        with duckdb.connect(str(path)) as connection:
            connection.execute("UPDATE process SET lost_records = 7 WHERE process = 1")
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))

    assert cli.main(["upgrade", str(older)]) == 0
    capsys.readouterr()
    assert records.run(capsys, "--into", fresh, file)[0] == 0

    for path in (older, fresh):
        (row,) = found(path)
        assert (row["name"], row["mode"]) == ("records.lost", "")
        assert row["sentence"].startswith("7 records were lost")
