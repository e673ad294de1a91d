"""What a store holds comes back as it went in, and a query reaches nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from kvtrace import schema
from kvtrace.errors import KvtraceError, QueryError
from kvtrace.store import Store, discard, working_path
from tests.dashboards import tools
from tests.stores import events

HOSTILE = [
    'it\'s "quoted"',
    "'; DROP TABLE event; --",
    "a\x00b\x01\x1b[31m\r\n\t",
    "é 漢 🦆 \u202e",
    "x" * 4096,
    "$1 {} %s \\",
    "",
]


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blank") / "run.duckdb"
    Store.open(path, "write").close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.duckdb"


# Contents --------------------------------------------------------------------------------------------


def test_hostile_strings_come_back_as_they_went_in(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.append("event", events(*HOSTILE))
        store.remember({text or "empty": text for text in HOSTILE})
        found = [row["request"] for row in store.rows("SELECT request FROM event ORDER BY t_ns")]
        by_text = [len(store.rows("SELECT * FROM event WHERE request = $r", {"r": text})) for text in HOSTILE]
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}

    assert found == HOSTILE
    assert by_text == [1] * len(HOSTILE)
    assert all(facts[text or "empty"] == text for text in HOSTILE)


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    with Store.open(path, "write") as store:
        with pytest.raises(QueryError), store.transaction():  # noqa: PT012 -- the second statement is the one that fails
            store.append("event", events("a"))
            store.execute("INSERT INTO event (stage) VALUES ('no.such')")
        with store.transaction():
            store.append("event", events("b"))

        assert [row["request"] for row in store.rows("SELECT request FROM event")] == ["b"]


def test_a_fact_is_written_in_place_of_its_earlier_value(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.remember({"mode": "push"})
        store.remember({"mode": "pull"})

        assert store.rows("SELECT value FROM run WHERE name = 'mode'") == [{"value": "pull"}]


def test_forgetting_requests_takes_their_segments_along(path: Path) -> None:
    with Store.open(path, "write") as store:
        store.append("request", pa.table({"request_key": [1, 2], "request_id": ["a", "b"]}))
        store.append("segment", pa.table({"request_key": [1, 2], "cause": ["wire", "post"]}))
        store.append("hidden", pa.table({"request_key": [1, 2], "cause": ["registration", "registration"]}))
        store.forget_requests(["a", "c"])

        assert store.next_request_key() == 3
        for table in ("request", "segment", "hidden"):
            assert store.rows(f"SELECT request_key FROM {table}") == [{"request_key": 2}]  # noqa: S608


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM run",
        "DROP TABLE event",
        "ATTACH '{other}' AS other",
        "COPY (SELECT 1) TO '{other}'",
        "EXPORT DATABASE '{other}'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM secret_of_the_caller",
    ],
)
def test_a_query_reaches_nothing_but_the_store(blank: Path, tmp_path: Path, sql: str) -> None:
    secret_of_the_caller = pa.table({"a": [1]})
    before = blank.read_bytes()
    other = tmp_path / "other"
    with Store.open(blank) as store, pytest.raises(KvtraceError):
        store.select(sql.format(other=other))

    assert blank.read_bytes() == before
    assert not other.exists()
    assert secret_of_the_caller.num_rows == 1


def test_a_refused_query_is_one_line(path: Path) -> None:
    Store.open(path, "write").close()
    with Store.open(path) as store, pytest.raises(QueryError) as caught:
        store.select("SELECT\n  nonsense FROM event")

    assert "\n" not in str(caught.value)
    assert "nonsense" in str(caught.value)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_long_query_draws_nothing_on_stdout(path: Path, mode: Literal["read", "write"]) -> None:
    """DuckDB 2 shows a progress bar after two seconds, in the middle of what a program reads as JSON."""
    Store.open(path, "write").close()
    with Store.open(path, mode) as store:
        assert store.rows("SELECT current_setting('enable_progress_bar') AS shown") == [{"shown": False}]


def test_times_come_in_utc_whatever_the_machine_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with Store.open(path, "write") as store:
        store.append("event", events("a", first=1_700_000_000_123_456_789))
    with Store.open(path) as store:
        rows = store.rows("SELECT ts FROM event_named")

    assert rows[0]["ts"].isoformat() == "2023-11-14T22:13:20.123456+00:00"


# Other versions of DuckDB ----------------------------------------------------------------------------


def test_the_file_has_the_storage_format_of_duckdb_1_0(path: Path) -> None:
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
    with Store.open(path) as store:
        tags = store.rows("SELECT tags['storage_version'] AS v FROM duckdb_databases() WHERE database_name = 'run'")

    assert tags[0]["v"].startswith("v1.0.0")


@pytest.mark.dashboards
def test_duckdb_1_reads_a_published_store(path: Path) -> None:
    """The DuckDB inside Grafana's plug-in is a 1.x: it answers from the tables and from the views."""
    old = tools.old_duckdb_python()
    with Store.open(working_path(path), "write") as store:
        store.append("event", events(*(f"request {i}" for i in range(3000))))
        store.publish(path)
    views = ",".join(view.name for view in schema.VIEWS)
    code = """
import sys, duckdb
assert duckdb.__version__.startswith("1.5."), duckdb.__version__
connection = duckdb.connect(sys.argv[1], read_only=True)
print(connection.execute("SELECT count(*), count(DISTINCT request) FROM event").fetchone())
for view in sys.argv[2].split(","):
    connection.execute(f"SELECT count(*) FROM {view}").fetchone()
print(connection.execute("SELECT count(*) FROM duckdb_columns() WHERE comment IS NULL AND NOT internal").fetchone())
"""
    done = subprocess.run([old, "-c", code, str(path), views], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3000, 3000)\n(0,)\n"


def test_discarding_takes_all_that_a_store_left(path: Path) -> None:
    with Store.open(working_path(path), "write") as store:
        store.publish(path)
    path.with_name(path.name + ".wal").touch()
    discard(path)

    assert list(path.parent.iterdir()) == []
