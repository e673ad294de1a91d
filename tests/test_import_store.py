"""What an import does to a store: all files or none, nothing twice, never beside a recorder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from kvtrace.errors import StoreError
from kvtrace.importers import intake
from kvtrace.store import Store, created, identity, revised
from tests import import_records as records
from tests.import_records import run
from tests.trace import push


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return records.recorded(tmp_path / "run.duckdb", push())


def content(path: Path) -> list[dict[str, object]]:
    """Return all that an import adds to, facts and notices aside."""
    return [
        *records.rows(path, "SELECT * EXCLUDE (process) FROM event ORDER BY ALL"),
        *records.rows(path, "SELECT * EXCLUDE (request_key) FROM request ORDER BY request_id"),
    ]


def test_the_same_file_adds_nothing_twice_and_says_so(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))
    run(capsys, "--into", store, file)
    before, bytes_before = content(store), store.read_bytes()
    again = records.write(tmp_path / "renamed.jsonl", records.aiperf("r1", -2, 65, 101))

    code, said = run(capsys, "--into", store, file, again)

    assert code == 0
    assert said.count("has been imported before and adds nothing") == 2
    assert "nothing is new" in said
    assert (content(store), store.read_bytes()) == (before, bytes_before)


def test_a_file_that_has_grown_adds_what_is_new(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [records.aiperf("r1", -2, 65, 101), records.aiperf("r1", -1, 65, 101), records.aiperf(None, 5, 65, 101)]
    file = records.write(tmp_path / "p.jsonl", *first)
    run(capsys, "--into", store, file)
    records.write(file, *first, records.aiperf("other", 0, 65, 101))

    _, said = run(capsys, "--into", store, file)

    assert "3 points added; 9 of its points are there already" in said
    assert len(records.requests(store)) == 4


def test_a_store_with_an_amount_that_nothing_has_is_answered_whole_without_it(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older kvtrace took it in, and then could answer for no request, of the import's or of before."""
    with duckdb.connect(str(store)) as connection:
        spoilt = f"UPDATE event SET request = 'hostile', b = {2**63 - 1} WHERE stage = 'transfer.done'"  # noqa: S608 -- a constant
        connection.execute(spoilt)
        connection.execute("DELETE FROM request")
    file = records.write(tmp_path / "p.jsonl", records.aiperf("other", 0, 65, 101))

    code, said = run(capsys, "--into", store, file)

    assert code == 0
    assert f"{store}: held amounts that nothing has, in 1 event, which was left out" in said
    assert len(records.requests(store)) == 2


def test_one_file_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("x", 0, 65, 101))

    _, said = run(capsys, "-o", tmp_path / "run.duckdb", file, file)

    assert "has been imported before" in said
    assert len(records.requests(tmp_path / "run.duckdb")) == 1


def test_a_wrong_file_among_good_ones_leaves_the_store_as_it_was(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = records.write(tmp_path / "good.jsonl", records.aiperf("r1", -2, 65, 101))
    cut = tmp_path / "cut.jsonl"
    cut.write_text(records.aiperf("a", 0, 50, 90) + "\n" + records.aiperf("b", 0, 50, 90)[:-40])
    before = store.read_bytes()

    code, said = run(capsys, "--into", store, good, cut)

    assert code == 1
    assert "cut.jsonl: line 2: the record is cut short; nothing was imported" in said
    assert store.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "good.jsonl", "run.duckdb"]


def test_a_failure_in_the_middle_leaves_the_store_as_it_was(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks while the copy is completed, only the copy is gone."""
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))
    before = store.read_bytes()

    def fail(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(intake.analyze, "analyze", fail)
    code, said = run(capsys, "--into", store, file)

    assert code == 1
    assert "could not be written: No space left on device; it is as it was" in said
    assert store.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl", "run.duckdb"]


def test_a_store_that_is_being_recorded_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.duckdb.working").write_bytes(b"")
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))
    before = store.read_bytes()

    code, said = run(capsys, "--into", store, file)

    assert code == 1
    assert "is being recorded" in said
    assert store.read_bytes() == before


def test_a_store_that_changes_meanwhile_is_left_as_the_other_left_it(store: Path) -> None:
    def change() -> None:
        with revised(store) as copy:
            copy.remember({"mine": "1"})
            with Store.open(store, "write") as other:
                other.remember({"theirs": "1"})

    with pytest.raises(StoreError, match="was changed by another program meanwhile"):
        change()

    names = {row["name"] for row in records.rows(store, "SELECT name FROM run")}
    assert "theirs" in names
    assert "mine" not in names


def test_a_store_that_changed_since_it_was_read_is_left_alone(store: Path) -> None:
    """What an import adds follows from what it has read before: another version must not get it."""
    seen = identity(store)
    with Store.open(store, "write") as other:
        other.remember({"theirs": "1"})

    with pytest.raises(StoreError, match="was changed by another program meanwhile"), revised(store, seen) as copy:
        copy.remember({"mine": "1"})

    assert "mine" not in {row["name"] for row in records.rows(store, "SELECT name FROM run")}


def test_what_another_program_left_in_a_log_is_not_lost(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = store.with_name("run.duckdb.wal")
    log.write_bytes(b"changes")

    code, said = run(capsys, "--into", store, records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101)))

    assert code == 1
    assert "open it once with duckdb" in said
    assert log.read_bytes() == b"changes"


def test_what_a_killed_import_left_goes_with_the_next_one(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    left = [store.with_name(f"run.duckdb.arriving-{killed.pid}{suffix}") for suffix in ("", ".wal")]
    alive = store.with_name(f"run.duckdb.arriving-{os.getppid()}")
    for file in (*left, alive):
        file.touch()

    code, _ = run(capsys, "--into", store, records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101)))

    assert code == 0
    assert [file.exists() for file in (*left, alive)] == [False, False, True]


def test_force_overwrites_a_store_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("x", 0, 65, 101))
    before = file.read_bytes()

    code, said = run(capsys, "-o", file, "--force", file)

    assert code == 1
    assert "is not a DuckDB file" in said
    assert file.read_bytes() == before


def test_a_name_that_was_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new.duckdb"

    with pytest.raises(StoreError, match="exists and is not overwritten"), created(path, force=False):
        path.write_bytes(b"theirs")

    assert path.read_bytes() == b"theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["new.duckdb"]


def test_a_link_to_a_store_stays_a_link(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "latest.duckdb"
    link.symlink_to(store)
    store.chmod(0o640)

    run(capsys, "--into", link, records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101)))

    assert link.is_symlink()
    assert records.requests(store)["r1"]["scope"] == "client"
    assert store.stat().st_mode & 0o777 == 0o640


def test_a_store_whose_release_lacks_a_point_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(store, "write") as opened:
        opened.execute("CREATE OR REPLACE VIEW vocabulary AS SELECT 'router.received' AS stage")
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))

    code, said = run(capsys, "--into", store, file)

    assert code == 1
    assert "client.done is no point of this store, which an older kvtrace made" in said


def test_a_new_store_overwrites_only_when_told(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("x", 0, 65, 101))

    code, said = run(capsys, "-o", store, file)
    assert code == 1
    assert "exists and is not overwritten; use --into to add to it, or --force" in said

    code, _ = run(capsys, "-o", store, "--force", file)
    assert code == 0
    assert set(records.requests(store)) == {"x"}


@pytest.mark.parametrize(
    "arguments",
    [["p.jsonl"], ["--into", "a", "-o", "b", "p.jsonl"], ["--into", "a", "--force", "p.jsonl"], ["-o", "a"]],
)
def test_wrong_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, *arguments)

    assert code == 2
    assert said.startswith("kvtrace: error: ")


def test_a_format_can_be_forced_and_an_unknown_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records.write(tmp_path / "p.jsonl", records.aiperf("x", 0, 65, 101))

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", "--format", "dynamo", file)
    assert (code, "line 1: its schema is not dynamo.request.trace.v1" in said) == (1, True)

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", "--format", "tea", file)
    assert (code, "there is no format tea; there are vllm-lifecycle, aiperf" in said) == (2, True)

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", "--format", "vllm-lifecycle", file)
    assert (code, "line 1: neither this line nor any other is one of vllm-kv-connector-v1" in said) == (1, True)


@pytest.mark.parametrize(
    ("content_bytes", "complaint"),
    [
        (b"", "is empty"),
        (b"\n \n", "is of no known format"),
        (b"hello\n", "is of no known format"),
        (b"\x1f\x8b\x08", "is packed (gzip); unpack it first"),
        (b"\xff\xfe\x00" * 100, "is of no known format"),
    ],
)
def test_files_that_are_no_use_are_one_clear_line(
    content_bytes: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content_bytes)

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", file)

    assert code == 1
    assert complaint in said
    assert said.count("\n") == 1


def test_what_is_no_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, complaint in ((".", "no regular file"), ("pipe", "no regular file"), ("none", "cannot be read")):
        code, said = run(capsys, "-o", tmp_path / "run.duckdb", tmp_path / name)

        assert code == 1
        assert complaint in said


def test_two_clocks_leave_same_host_without_a_meaning(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(store, "write") as opened:
        opened.execute("UPDATE process SET host = 'host-b' WHERE process = 2")
    file = records.write(tmp_path / "p.jsonl", records.aiperf("r1", -2, 65, 101))

    code, said = run(capsys, "--into", store, "--same-host", file)

    assert code == 1
    assert "the store has processes of 2 clocks, so --same-host does not say whose" in said
