"""Ids that are quotes, SQL, markup, control characters or 10 kB pass through every export, unharmed and unharming."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvtrace import cli, stages
from kvtrace.store import Store
from tests import exported
from tests.otlp_receiver import RECEIVERS, values
from tests.test_export import otlp_spans
from tests.trace import MS, P, ns, push


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported.write(tmp_path_factory.mktemp("store") / "run.duckdb", *exported.varied())


@pytest.mark.parametrize("name", exported.HOSTILE, ids=range(len(exported.HOSTILE)))
def test_a_hostile_request_is_found_and_exported_whole(store: Path, tmp_path: Path, name: str) -> None:
    """Each format, by its id alone: the id comes back letter for letter, and only its request does."""
    targets = {form: tmp_path / form for form in ("perfetto", "otlp-json", "parquet")}
    for form, target in targets.items():
        if "\x00" in name:  # no command line can hold it
            continue
        assert cli.main(["export", str(store), "--format", form, "-o", str(target), "--requests", name]) == 0

    if "\x00" in name:
        return
    read = exported.Reader().parse(targets["perfetto"].read_bytes())
    paths = [one for track, some in read.slices.items() if track[0] == "critical path" for one in some]
    (spans,) = otlp_spans(targets["otlp-json"].read_bytes())
    rows = pq.read_table(targets["parquet"] / "request.parquet").column("request_id").to_pylist()
    assert [one.notes["request_id"] for one in paths] == [name]
    assert all(one.name.isprintable() and len(one.name) <= 120 for one in paths)
    assert {values(span.attributes)["kvtrace.request_id"] for _, span in spans} == {name}
    assert len(spans) >= 5
    assert rows == [name]


@pytest.mark.parametrize("transport", RECEIVERS)
def test_hostile_ids_reach_a_receiver_unharmed(store: Path, transport: str) -> None:
    with RECEIVERS[transport]() as received:
        assert cli.main(["export", str(store), "--format", "otlp", "--endpoint", received.endpoint]) == 0

    roots = [values(span.attributes) for span in received.spans() if span.name == "kvtrace.request"]
    assert set(exported.HOSTILE) <= {attributes["kvtrace.request_id"] for attributes in roots}


def test_the_store_is_as_it_was_and_nothing_reaches_the_terminal(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = store.read_bytes()
    for form in ("perfetto", "otlp-json", "parquet"):
        assert cli.main(["export", str(store), "--format", form, "-o", str(tmp_path / form)]) == 0
        out, err = capfd.readouterr()
        assert out == ""
        assert err.replace("\n", "").isprintable()

    assert store.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["otlp-json", "parquet", "perfetto"]
    with Store.open(store) as opened:
        assert opened.rows("SELECT count(*) AS n FROM request") == [{"n": len(exported.varied())}]


def test_lines_stay_lines(store: Path, tmp_path: Path) -> None:
    """One line a request, whatever separators an id holds."""
    target = tmp_path / "run.jsonl"
    assert cli.main(["export", str(store), "--format", "otlp-json", "-o", str(target)]) == 0

    assert target.read_bytes().count(b"\n") == len(exported.varied())


@pytest.mark.parametrize("busy_ns", [-(2**63), -1, 2**62, 2**63 - 1])
def test_a_sender_that_was_awake_for_ever_is_so_since_it_slept(tmp_path: Path, busy_ns: int) -> None:
    trace = push().at(95, stages.SENDER_SLEPT, "", busy_ns, process=P)
    store, target = exported.write(tmp_path / "run.duckdb", trace), tmp_path / "run.trace"
    assert cli.main(["export", str(store), "--format", "perfetto", "-o", str(target)]) == 0

    read = exported.Reader().parse(target.read_bytes())
    awake = [one for some in read.slices.values() for one in some if one.name == "awake"]
    assert [(one.start_ns - ns(90), one.end_ns - ns(90)) for one in awake[1:]] == [
        (0 if busy_ns > 0 else 5 * MS, 5 * MS)
    ]
