"""Results of `vllm bench serve`: placed by a stated clock or by their date, joined by the prefix of their ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtrace.store import Store
from tests import import_records as records
from tests.import_records import run
from tests.trace import MS, START_NS, push


def on_clock(path: Path, offset_s: int) -> Path:
    """State in a store that its host's monotonic clock is `offset_s` behind unix time."""
    with Store.open(path, "write") as store:
        store.execute("UPDATE process SET offset_ns = $ns", {"ns": offset_s * 10**9})
    return path


def test_bench_of_the_same_host_is_placed_exactly_and_joined_by_its_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load ran where the engines did: its readings of the monotonic clock are those of the store."""
    store = records.recorded(tmp_path / "run.duckdb", push(name="run-0"), push(name="run-1").later(1000))
    on_clock(store, START_NS // 10**9 - 1000)
    document = records.bench((999.998, 0.065, 0.101), (1000.999, 0.063, 0.1), request_id_prefix="run-")
    file = records.write(tmp_path / "bench.json", json.dumps(document))

    code, said = run(capsys, "--into", store, "--same-host", file)

    found = records.requests(store)
    assert code == 0, said
    assert [(found[name]["scope"], found[name]["ttft_ns"]) for name in ("run-0", "run-1")] == [
        ("client", 65 * MS),
        ("client", 63 * MS),
    ]
    assert records.causes_ms(store, "run-0")["client.hop"] == pytest.approx(2)


def test_bench_without_a_clock_is_placed_by_its_date_and_without_ids_joins_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run.duckdb"
    file = records.write(tmp_path / "bench.json", json.dumps(records.bench((5.0, 0.1, 0.5), (6.0, 0.2, 0.5)), indent=1))

    code, said = run(capsys, "-o", store, file)

    found = sorted(records.requests(store).values(), key=lambda row: row["start_ns"])
    assert code == 0, said
    assert [row["ttft_ns"] for row in found] == [100 * MS, 200 * MS]
    assert found[1]["end_ns"] == 1_000_000_010 * 10**9  # 2001-09-09 01:46:50
    assert "names no request, so nothing joins" in said
    assert "has a date in its host's local time, read as UTC, so it may be hours off" in said
    assert "--metadata utc_offset=+02:00" in said


def test_bench_whose_metadata_has_a_zone_is_placed_by_its_local_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """03:46:50 two hours east of Greenwich is 01:46:50 there."""
    store = tmp_path / "run.duckdb"
    bench = records.bench((5.0, 0.1, 0.5), utc_offset="+02:00", date="20010909-034650")
    code, said = run(capsys, "-o", store, records.write(tmp_path / "bench.json", json.dumps(bench)))

    (found,) = records.requests(store).values()
    assert code == 0, said
    assert found["end_ns"] == 1_000_000_010 * 10**9
    assert "is placed by its date, to a second at best" in said


def test_bench_appended_to_a_file_is_a_document_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "run.duckdb"
    documents = [json.dumps(records.bench((start, 0.1, 0.5), request_ids=[f"x{start}"])) for start in (1.0, 2.0)]
    file = records.write(tmp_path / "bench.json", *documents)

    code, said = run(capsys, "-o", store, file)

    assert code == 0, said
    assert set(records.requests(store)) == {"x1.0", "x2.0"}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"start_times": None}, "line 1: is no such record: start_times is of type null, and array is wanted"),
        ({"ttfts": [0.1, 0.2]}, "line 1: ttfts has 2 entries and start_times 1"),
        ({"ttfts": [float("nan")]}, "line 1: ttfts[0] is no duration"),
        ({"start_times": [-1.0]}, "line 1: start_times[0] is no reading of a clock"),
        ({"date": "yesterday"}, "line 1: its times are of the load host's own clock and it has no date"),
        ({"utc_offset": "Berlin"}, "line 1: utc_offset 'Berlin' is none; write it like +02:00"),
        ({"itls": [[float("inf")]]}, "line 1: the time of request 0 is no duration"),
    ],
)
def test_bench_that_cannot_be_is_refused(
    changed: dict[str, object], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = records.write(tmp_path / "bench.json", json.dumps(records.bench((1.0, 0.1, 0.5), **changed)))

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", file)

    assert code == 1
    assert complaint in said
    assert not (tmp_path / "run.duckdb").exists()


def test_a_result_without_details_says_which_option_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = records.bench((1.0, 0.1, 0.5))
    for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors"):
        del document[name]
    file = records.write(tmp_path / "bench.json", json.dumps(document))

    code, said = run(capsys, "-o", tmp_path / "run.duckdb", file)

    assert code == 1
    assert "holds no single requests; run it with --save-result --save-detailed" in said


def test_failed_requests_of_bench_have_no_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = records.bench((1.0, 0.0, 0.0), request_ids=["x"], itls=[[]], errors=[f"Traceback {records.PROMPT}"])
    file = records.write(tmp_path / "bench.json", json.dumps(document))
    store = tmp_path / "run.duckdb"

    run(capsys, "-o", store, file)

    assert records.requests(store)["x"]["verdict"] == "failed"
    assert records.PROMPT.encode() not in store.read_bytes()
