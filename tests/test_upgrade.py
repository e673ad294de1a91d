"""`kvtrace upgrade`: what was recorded is kept, the answers are worked out again, a failure changes nothing."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from kvtrace import cli, schema
from kvtrace.errors import StoreError
from kvtrace.model import Event
from kvtrace.store import Store, created, working_path
from tests.golden_files import GOLDEN
from tests.moulds import cast
from tests.test_analyze import process_row
from tests.trace import MS, PROCESSES, pull, push


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a store of schema 1 with a push and a pull hand-off of 60 ms, and answers that schema 1 gave."""
    return write_older(tmp_path / "run.duckdb", 1)


def write_older(path: Path, version: int) -> Path:
    """Write a store as kvtrace wrote it at that version of the schema."""
    return cast(path, ("older", version), partial(_make_older, version=version))


def _make_older(path: Path, version: int) -> None:
    events = push(name="a").events + pull("b").later(1_000).events
    with duckdb.connect(str(path), config={"storage_compatibility_version": "v1.0.0"}) as connection:
        connection.execute((GOLDEN / f"schema_{version}.sql").read_text())
        facts = {"format": "kvtrace", "schema_version": str(version), "kvtrace": "0.1.0", "vllm": "0.32.0"}
        connection.executemany("INSERT INTO run VALUES (?, ?)", list(facts.items()))
        processes = pa.Table.from_pylist(
            [process_row(process) for process in PROCESSES],
            schema=connection.sql("FROM process LIMIT 0").to_arrow_table().schema,
        )
        recorded = pa.Table.from_pylist([dict(zip(Event._fields, event, strict=True)) for event in events])
        for table, rows in (("process", processes), ("event", recorded)):
            connection.register("arriving", rows)
            names = ", ".join(f'"{name}"' for name in rows.column_names)
            connection.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM arriving")  # noqa: S608 -- names of ours
            connection.unregister("arriving")
        connection.execute("INSERT INTO request (request_key, request_id) VALUES (1, 'what schema 1 said')")


def test_an_older_store_is_readable_after_its_upgrade(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(older)]) == 1
    assert f"`kvtrace upgrade {older}`" in capsys.readouterr().err

    assert cli.main(["upgrade", str(older)]) == 0

    assert "2 requests worked out again" in capsys.readouterr().out
    with Store.open(older) as store:
        rows = store.rows("SELECT request_id, ttft_ns, verdict FROM request ORDER BY request_id")
        facts = {row["name"]: row["value"] for row in store.rows("FROM run")}
        (events,) = store.rows("SELECT count(*) AS n, count(DISTINCT process) AS processes FROM event")
        walked = store.rows("SELECT request_id, ttft_ns FROM walk_request ORDER BY request_id")
    assert rows == [
        {"request_id": "a", "ttft_ns": 60 * MS, "verdict": "complete"},
        {"request_id": "b", "ttft_ns": 60 * MS, "verdict": "complete"},
    ]
    assert (facts["schema_version"], facts["upgraded_from"]) == (str(schema.SCHEMA_VERSION), "1")
    assert facts["vllm"] == "0.32.0"
    assert walked == [{"request_id": name, "ttft_ns": 60 * MS} for name in "ab"]
    assert events["n"] == len(push().events) + len(pull().events)
    assert [entry.name for entry in older.parent.iterdir()] == ["run.duckdb"]


def test_an_amount_that_nothing_has_costs_an_older_store_its_event_alone(
    older: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older kvtrace took it in; one such number kept all requests from being worked out."""
    with duckdb.connect(str(older)) as connection:
        connection.execute(f"UPDATE event SET request = 'hostile', b = {2**63 - 1} WHERE stage = 'transfer.done'")  # noqa: S608 -- a constant

    assert cli.main(["upgrade", str(older)]) == 0

    assert "held amounts that nothing has, in 2 events, which were left out" in capsys.readouterr().err
    with Store.open(older) as store:
        rows = store.rows("SELECT request_id, ttft_ns FROM request ORDER BY request_id")
    assert rows == [{"request_id": name, "ttft_ns": 60 * MS} for name in "ab"]


def test_a_store_whose_transfers_and_steps_were_views_has_them_as_tables(tmp_path: Path) -> None:
    """Schema 4 pivoted events where they were asked for; what was there stays there, column by column."""
    path = write_older(tmp_path / "run.duckdb", 4)
    asked = {
        name: f"SELECT {', '.join(columns)} FROM {name} ORDER BY ALL"  # noqa: S608 -- names of ours
        for name, columns in {
            "step": ["process", "step", "engine", "ts", "scheduled_ns", "ended_ns", "tokens", "ranks", "connector_ns"],
            "transfer": [
                "process",
                "transfer",
                "engine",
                "remote_request",
                "ts",
                "post_ended_ns",
                "done_at_post",
                "done_ns",
                "polls",
                "notified_ns",
            ],
        }.items()
    }
    with duckdb.connect(str(path), read_only=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        before = {name: connection.execute(sql).fetchall() for name, sql in asked.items()}

    assert cli.main(["upgrade", str(path)]) == 0

    with Store.open(path) as store:
        assert {name: store.select(sql).values for name, sql in asked.items()} == before
        kinds = store.rows(
            "SELECT DISTINCT table_type FROM information_schema.tables WHERE table_name IN ('step', 'transfer')"
        )
    assert [row["table_type"] for row in kinds] == ["BASE TABLE"]
    assert len(before["step"]) == 5
    assert len(before["transfer"]) == 2


def test_an_upgraded_store_has_nothing_left_to_upgrade(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["upgrade", str(older)]) == 0

    before = older.read_bytes()
    capsys.readouterr()
    working_path(older).touch()  # what is recorded right now is current as well

    assert cli.main(["upgrade", str(older)]) == 0
    assert capsys.readouterr() == (f"{older} is current: there is nothing to upgrade\n", "")
    assert older.read_bytes() == before


def test_a_store_may_have_any_name(older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("older", "run before"):
        path = shutil.copy(older, tmp_path / f"{name}.duckdb")

        assert cli.main(["upgrade", str(path)]) == 0, capsys.readouterr().err


def test_a_newer_store_is_left_alone(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with duckdb.connect(str(older)) as connection:
        connection.execute("UPDATE run SET value = '99' WHERE name = 'schema_version'")
    before = older.read_bytes()

    assert cli.main(["upgrade", str(older)]) == 1
    assert "upgrade kvtrace" in capsys.readouterr().err
    assert older.read_bytes() == before


def test_a_store_that_is_still_recorded_is_left_alone(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    working_path(older).touch()

    assert cli.main(["upgrade", str(older)]) == 1
    assert "is being recorded" in capsys.readouterr().err


def test_a_failure_leaves_the_older_store(
    older: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_store: Store) -> int:
        raise MemoryError

    monkeypatch.setattr("kvtrace.cli.upgrade.analyze", fail)
    before = older.read_bytes()

    assert cli.main(["upgrade", str(older)]) == 1
    assert "MemoryError" in capsys.readouterr().err
    assert older.read_bytes() == before
    assert [entry.name for entry in older.parent.iterdir()] == ["run.duckdb"]


def test_nothing_and_something_else_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("hello")
    monkeypatch.chdir(tmp_path)

    for path, said in (
        (tmp_path / "nothing.duckdb", "does not exist"), (foreign, "is not a DuckDB file"),
        (".", ". is a folder; name a store in it"), ("/", "/ is a folder; name a store in it"),
    ):  # fmt: skip
        assert cli.main(["upgrade", str(path)]) == 1
        assert len((err := capsys.readouterr().err).splitlines()) == 1
        assert said in err
    with pytest.raises(StoreError, match="is a folder"), created(Path(), force=True):
        pass


def test_a_link_stays_a_link_and_its_store_is_upgraded(older: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.duckdb"
    link.symlink_to(older)
    older.chmod(0o600)

    assert cli.main(["upgrade", str(link)]) == 0

    assert link.is_symlink()
    assert older.stat().st_mode & 0o777 == 0o600
    with Store.open(older) as store:
        assert store.rows("SELECT count(*) AS n FROM request") == [{"n": 2}]


def test_a_store_without_its_recorded_tables_is_left_alone(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with duckdb.connect(str(older)) as connection:
        connection.execute("DROP TABLE event CASCADE")
    before = older.read_bytes()

    assert cli.main(["upgrade", str(older)]) == 1
    assert "lacks table event" in capsys.readouterr().err
    assert older.read_bytes() == before


@pytest.mark.parametrize("column", [column.name for column in schema.TABLE_BY_NAME["event"].columns])
def test_an_event_without_a_value_is_named_and_its_store_is_left_alone(
    column: str, older: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with duckdb.connect(str(older)) as connection:
        connection.execute(f'UPDATE event SET "{column}" = NULL WHERE rowid IN (3, 5)')  # noqa: S608 -- a name of ours
        rows = connection.execute(f'SELECT rowid FROM event WHERE "{column}" IS NULL ORDER BY 1').fetchall()  # noqa: S608 -- a name of ours
    before = older.read_bytes()

    assert cli.main(["upgrade", str(older)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert f"table event, row {rows[0][0]} (and 1 more): {column} is NULL; the store is left as it is" in line
    assert f"`duckdb {older} 'DELETE FROM event WHERE {column} IS NULL'`" in line  # noqa: S608 -- not run
    assert older.read_bytes() == before
    assert [entry.name for entry in older.parent.iterdir()] == ["run.duckdb"]


def test_a_stage_that_nobody_knows_is_named_and_what_the_line_says_helps(
    older: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with duckdb.connect(str(older)) as connection:
        for view in ("vocabulary", "step", "ttft"):
            connection.execute(f"DROP VIEW IF EXISTS {view}")
        connection.execute("ALTER TABLE event ALTER stage TYPE VARCHAR")
        connection.execute("INSERT INTO event (process, stage, t_ns) VALUES (1, 'router.guessed', 7)")
    before = older.read_bytes()

    assert cli.main(["upgrade", str(older)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "'router.guessed' is no stage that this kvtrace knows; the store is left as it is" in line
    assert older.read_bytes() == before

    with duckdb.connect(str(older)) as connection:
        connection.execute(shlex.split(line.split("`")[1])[2])
    assert cli.main(["upgrade", str(older)]) == 0


def test_a_column_that_is_missing_is_named(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with duckdb.connect(str(older)) as connection:
        connection.execute("ALTER TABLE event DROP COLUMN d")
    before = older.read_bytes()

    assert cli.main(["upgrade", str(older)]) == 1
    assert "lacks column d of table event" in capsys.readouterr().err
    assert older.read_bytes() == before


def test_what_another_program_left_in_a_log_is_not_lost(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older.with_name("run.duckdb.wal").write_bytes(b"changes")

    assert cli.main(["upgrade", str(older)]) == 1
    assert "open it once with duckdb" in capsys.readouterr().err
    assert older.with_name("run.duckdb.wal").read_bytes() == b"changes"


def test_of_two_upgrades_at_once_one_succeeds_and_nothing_is_lost(older: Path) -> None:
    command = [sys.executable, "-m", "kvtrace", "upgrade", str(older)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]

    assert 0 in [process.returncode for process in both], said
    assert all("unexpected" not in text for text in said)
    with Store.open(older) as store:
        assert store.rows("SELECT count(*) AS n FROM request") == [{"n": 2}]
    assert [entry.name for entry in older.parent.iterdir()] == ["run.duckdb"]


def test_a_link_to_itself_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loop.duckdb"
    path.symlink_to(path)

    assert cli.main(["upgrade", str(path)]) == 1

    assert f"{path} leads nowhere: its links lead back to it" in capsys.readouterr().err
