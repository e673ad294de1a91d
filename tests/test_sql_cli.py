"""`kvtrace sql`: answers on stdout and nothing else, refusals in one line on stderr."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace import analyze, cli, queries
from kvtrace.store import Store
from kvtrace.testing import Fleet, fill
from tests.sample_store import PUSH_PATH, Sample
from tests.waiting import LONG_S, until


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = Sample()
    sample.add("r1", PUSH_PATH)
    sample.add("r2", PUSH_PATH, start_ms=500, client_request_id='odd \x1b[31m,\n"id"')
    return sample.write(tmp_path_factory.mktemp("sql") / "run.duckdb")


def test_a_named_query_as_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(store), "slowest_requests", "--json", "-p", "limit=1"]) == 0
    rows = json.loads(capsys.readouterr().out)

    assert [(row["request_id"], row["ttft_ms"], row["started"][:4]) for row in rows] == [("r1", 100.0, "2023")]


def test_a_select_with_a_parameter_as_csv(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT request_id, client_request_id FROM ttft WHERE request_id = $id"

    assert cli.main(["sql", str(store), sql, "--csv", "--param", "id=r2"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))

    assert rows == [["request_id", "client_request_id"], ["r2", 'odd \x1b[31m,\n"id"']]


def test_the_walk_in_sql_is_there_to_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it answers, it gives the nanoseconds that the recorder worked out."""
    path = tmp_path / "fleet.duckdb"
    with Store.open(path, "write") as store:
        fill(store, Fleet(40, odd_share=0.0))
        analyze.analyze(store)
    sql = """SELECT count(*) AS walked, count(*) FILTER (w.ns IS DISTINCT FROM r.coordination_ns) AS differing
      FROM request AS r JOIN (SELECT request_id, sum(end_ns - start_ns) FILTER (class = 'coordination')::BIGINT AS ns
        FROM walk_segment GROUP BY request_id) AS w USING (request_id)"""

    assert cli.main(["sql", str(path), sql, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row.pop("walked") > 30, "those of the first contact and their neighbours it declines"
    assert row == {"differing": 0}


def test_a_table_cannot_move_the_cursor(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(store), "SELECT request_id, client_request_id, ttft_ms FROM ttft ORDER BY 1"]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert len(lines) == 4
    assert lines[2].split() == ["r1", "100.000"]
    assert "\\x1b[31m,\\n" in lines[3]


def test_a_column_has_one_number_of_decimals(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moments with and without a fraction of a second, decimals, and numbers in lists; all of them to the right."""
    sql = """SELECT * FROM (VALUES
      (TIMESTAMPTZ '2026-01-02 03:04:05+00', 0.50::DECIMAL(4, 2), [0.5::DOUBLE, 0.25::DOUBLE], 1::USMALLINT),
      (TIMESTAMPTZ '2026-01-02 03:04:05.25+00', 12.75::DECIMAL(4, 2), [1::DOUBLE, NULL], 10::USMALLINT)
    ) AS v(ts, part, two, few)"""

    assert cli.main(["sql", str(store), sql]) == 0
    table = capsys.readouterr().out.splitlines()

    assert [line.split() for line in table[2:]] == [
        ["2026-01-02T03:04:05.000000+00:00", "0.50", "[0.500,", "0.250]", "1"],
        ["2026-01-02T03:04:05.250000+00:00", "12.75", "[1.000,", "NULL]", "10"],
    ]
    assert len({len(line) for line in table}) == 1


def test_odd_values_are_valid_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT 'nan'::DOUBLE AS a, [1, NULL] AS b, map(['k'], [1.50]) AS c, DATE '2026-01-02' AS d, 'x'::BLOB AS e"

    assert cli.main(["sql", str(store), sql, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"a": None, "b": [1, None], "c": {"k": 1.5}, "d": "2026-01-02", "e": "b'x'"}
    ]


def test_columns_of_one_name_are_all_in_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(store), "SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"a": 1, "a_1": 2, "a_1_1": 3, "a_2": 4}]


@pytest.mark.parametrize("form", ["--csv", "--json"])
def test_rows_leave_as_they_come(form: str, store: Path) -> None:
    """A thousand thousand million rows fit into no memory; a reader that has seen enough ends it."""
    command = [sys.executable, "-m", "kvtrace", "sql", store, "SELECT range AS n FROM range(1000000000000)", form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert asking.stderr is not None
        first = asking.stdout.readline() + asking.stdout.readline()
        asking.stdout.close()
        assert asking.wait(timeout=LONG_S) == 128 + signal.SIGPIPE
        assert asking.stderr.read() == b""
    assert first in (b"n\n0\n", b'[\n{"n": 0},\n')


def test_a_terminal_that_lacks_a_letter_shows_its_number_and_json_stays_json(store: Path) -> None:
    told = []
    for form in ((), ("--json",)):
        command = [sys.executable, "-m", "kvtrace", "sql", store, "SELECT 'é漢' AS a", *form]
        environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
        told.append(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert told[0].splitlines()[-1] == b"\xe9\\u6f22"
    assert json.loads(told[1].decode("ascii")) == [{"a": "é漢"}]


def test_an_answer_without_rows_is_empty_and_no_error(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(store), "drops", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_list_has_a_line_for_every_query(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", "--list"]) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  ")]

    assert sorted(lines) == [[query.name, query.title] for query in queries.load_all()]
    assert [line for line in out.splitlines() if line and line[0] != " "][:-1] == list(queries.GROUPS)
    assert cli.main(["sql", str(store), "--list"]) == 0
    assert capsys.readouterr().out == out


def test_the_list_of_one_query_has_its_parameters_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", "--list", "request_path", "drops"]) == 0
    path, _, drops = capsys.readouterr().out.partition("\n\n")

    assert "  request  VARCHAR  Needed. The request's id, or the one that its client sent." in path.splitlines()
    assert "  duration_ns    BIGINT   How long it took." in path.splitlines()
    assert drops.startswith("drops: What was lost")
    assert "parameters" not in drops


def test_the_list_as_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", "--list", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}

    for query in queries.load_all():
        one = listed[query.name]
        assert (one["title"], query.name in queries.GROUPS[one["group"]]) == (query.title, True)
        assert [(p["name"], p["sql_type"], p["doc"]) for p in [*one["parameters"], *one["columns"]]] == [
            (p.name, p.sql_type, p.doc) for p in [*query.parameters, *query.columns]
        ]
    assert [p["is_needed"] for p in listed["request_path"]["parameters"]] == [True, False]


def test_the_command_named_to_who_asks_for_an_unknown_request_lists_the_ids(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sql", str(store), "request_path", "-p", "request=nobody"]) == 1
    hint = re.search("`kvtrace (.*)`", capsys.readouterr().err)
    assert hint is not None
    assert cli.main([*shlex.split(hint[1]), "--json"]) == 0
    assert [row["request_id"] for row in json.loads(capsys.readouterr().out)] == ["r2", "r1"]


def test_a_request_is_found_by_its_clients_id_too(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(store), "request_path", "-p", 'request=odd \x1b[31m,\n"id"', "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["causses"], 2, "there is no query causses; `kvtrace sql --list` names them"),
        (["slowest_requests", "-p", "limit=ten"], 2, "parameter limit wants BIGINT, not 'ten'"),
        (["causes", "-p", "limit=1"], 2, "query causes has no parameter limit; it has mode"),
        (["SELECT $a", "-p", "b=1"], 2, "missing a, unknown b"),
        (["SELECT 1; DROP TABLE event"], 1, "one statement is expected and 2 were given"),
        (["DELETE FROM event"], 1, "read-only"),
        (["SELECT nonsense"], 1, "nonsense"),
        (["request_path"], 2, "query request_path needs its parameter request: add --param request=VALUE"),
        (["request_path", "-p", "attempt=0"], 2, "needs its parameter request"),
        (["request_path", "-p", "request="], 2, "needs its parameter request"),
        (["--list", "causses"], 2, "there is no query causses"),
        (["request_path", "-p", "request=r"], 1, "no request is called 'r' (a whole id is needed here); `kvtrace sql"),
        (["request_path", "-p", "request=\udcff"], 1, "no request is called"),
        (["request_hidden", "-p", "request=r1", "-p", "attempt=2"], 1, "request 'r1' has no attempt 2; it has 0"),
        (["--list", "--csv"], 2, "--list has no CSV"),
        (["causes", "-p", "mode"], 2, "--param wants name=value"),
        (["causes", "--json", "--csv"], 2, "--json and --csv exclude each other"),
        ([], 2, "name a store and a query"),
    ],
)
def test_a_refusal_is_one_line(
    store: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert cli.main(["sql", str(store), *arguments]) == code
    shown = capsys.readouterr()

    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert said in shown.err
    with Store.open(store) as opened:
        assert opened.rows("SELECT count(*) AS n FROM request") == [{"n": 2}]


def processor_s(pid: int) -> float:
    """Return how much processor time a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_interrupt_ends_a_query_at_once_and_says_nothing(store: Path) -> None:
    """Python hears of the signal only when DuckDB comes back to it, which this query does not."""
    endless = "SELECT sum(a.range * b.range) AS n FROM range(10000000) AS a, range(10000000) AS b"
    asking = subprocess.Popen(
        [sys.executable, "-m", "kvtrace", "sql", store, endless], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        until(lambda: processor_s(asking.pid) > 4, what="it has long been at the query: to start takes a second")
        asking.send_signal(signal.SIGINT)
        assert asking.communicate(timeout=LONG_S) == (b"", b"")
    finally:
        asking.kill()
    assert asking.returncode in (-signal.SIGINT, 130)  # the latter if it had not come so far
