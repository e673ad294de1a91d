"""What benches measured: the file it is kept in, the rows and tables that are printed from it."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import bench_attribution, bench_emit, bench_queries, bench_serving, figure_tables, figures
from tests.figure_rows import Row, at_least, at_most, in_words, outwards, plain, shortened, within
from tests.import_records import recorded
from tests.trace import push

MACHINE = {"cores": 2, "cpu": "A Processor", "memory_gib": 15.6, "clock_ns": [62.2, 104.7], "load": [0.1, 1.2]}


def entry(found: Any, **changed: Any) -> dict[str, Any]:
    return {
        "when": "2026-11-30T17:40:00+00:00", "took_s": 12, "commit": "0123456789", "machine": MACHINE,
        "command": "python -m tests.bench_ingest --figures docs/figures.json", "versions": {}, "found": found,
        **changed,
    }  # fmt: skip


INTERVALS = {
    "ttft": (0.02, -0.002, 0.042),
    "tpot": (0.01, 0.0, 0.02),
    "throughput": (0, -0.01, 0.01),
    "processor": (0, 0, 0),
}
# As each bench makes it, of those that take too long to be run here.
FOUND: dict[str, Any] = {
    "ingest": {
        "events": 4_000_000, "recorder": {"events_per_s": 1_170_400, "cpu_us_per_event": 0.9},
        "arrow_insert": {"events_per_s": 2_160_000},
    },
    "checks": {
        "parts": {
            "checksum_ms_per_mb": 0.31, "checksum_of_plain_copies": 2.4, "last_blocks_copied_us": 130.0,
            "last_blocks_bytes": 1_048_576, "choice_us": 1.4,
        },
        "serving": [
            {
                "mode": "push", "checked_blocks": 400, "unchecked_blocks": 0, "others_ttft_ms": 200.0,
                "ttft_more_ms": -2.0, "ttft_more_low_ms": -8.0, "ttft_more_high_ms": 4.0,
            }
        ],
    },
    "switched": [{"mode": mode, "requests_a_side": 381, **INTERVALS} for mode in ("push", "pull")],
    "publication": {
        "prefilled_events": 780_000, "events_per_s": 2_150, "age_max_s": 4.2, "age_median_s": 2.3,
        "requests_age_s": 5.0, "requests_age_max_s": 7.0, "publishing_share": 0.041, "first_s": 0.2, "warm_s": 11.3,
        "recorder_share": 0.62, "memory_mib": 660,
    },
}  # fmt: skip
FOUND |= {
    "switched_recorded": FOUND["switched"],
    "serving": FOUND["switched"],
    "serving_recorded": FOUND["switched"],
    "publication_large": FOUND["publication"],
}


# The file ----------------------------------------------------------------------------------------------


def test_a_bench_replaces_its_own_entry_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"emit": entry(1), "ingest": entry(2)}))

    figures.Run(path).keep("emit", {"took": (1.23456789, 2)})

    kept = figures.load(path)
    assert kept["ingest"] == entry(2)
    assert kept["emit"]["found"] == {"took": [1.23457, 2]}
    assert kept["emit"].keys() == entry(1).keys()
    assert kept["emit"]["machine"].keys() == MACHINE.keys()
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]


def test_benches_that_end_together_both_keep_their_figures(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests import figures\n"
        "run = figures.Run(Path(sys.argv[1]))\n"
        "for number in range(40): run.keep(sys.argv[2], number)\n"
    )
    path = tmp_path / "docs" / "figures.json"
    path.parent.mkdir()
    words = [sys.executable, "-c", script, str(path)]
    running = [subprocess.Popen([*words, name], cwd=figures.ROOT) for name in ("emit", "ingest")]

    assert [one.wait(timeout=60) for one in running] == [0, 0]
    assert {name: one["found"] for name, one in figures.load(path).items()} == {"emit": 39, "ingest": 39}


def test_a_file_that_cannot_be_written_whole_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"emit": entry(1)}))
    run = figures.Run(path)
    whole = Path.write_text

    def half(at: Path, text: str, **options: Any) -> int:
        whole(at, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)

    with pytest.raises(OSError, match="No space left"):
        run.keep("emit", 2)

    assert figures.load(path) == {"emit": entry(1)}
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.parametrize(
    "name", ["a folder", "a pipe", "/dev/full", "/dev/null", "/proc/figures.json", "a file/figures.json"]
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    os.mkfifo(tmp_path / "a pipe")

    with pytest.raises(SystemExit, match=f"{name} cannot be written: "):
        figures.Run(tmp_path / name)


@pytest.mark.parametrize(("text", "why"), [("{", "is not JSON"), ("[]", "no figures"), ('{"emit": {}}', "no figures")])
def test_a_file_of_something_else_is_refused_before_anything_is_measured(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(SystemExit, match=f"other.json .*{why}"):
        figures.Run(path)

    assert path.read_text() == text


def test_without_the_option_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures.Run(None).keep("emit", 1)

    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_names_neither_folders_nor_the_host(tmp_path: Path) -> None:
    words = [
        "--folder",
        str(tmp_path),
        f"--store={tmp_path}/run.duckdb",
        "--figures",
        str(figures.FILE),
        "--seconds",
        "40",
    ]

    said = figures.command(words)

    assert said.endswith(f" --folder {tmp_path.name} --store=run.duckdb --figures docs/figures.json --seconds 40")
    assert socket.gethostname() not in json.dumps([figures.machine(), figures.versions()])


# Rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "better", "shown"),
    [
        (249.6, "most", "250"), (250.04, "most", "251"), (250.04, "", "250"), (0.9999, "least", "0.999"),
        (1.0, "least", "1"), (1_234_567, "least", "1,230,000"), (4.1000000000000005, "most", "4.1"),
        (0.0304, "", "0.0304"), (0, "most", "0"), (23_450, "", "23,400"), (12, "most", "12"),
    ],
)  # fmt: skip
def test_a_figure_is_rounded_to_three_digits_and_to_the_disadvantage_of_its_aim(
    value: float, better: str, shown: str
) -> None:
    assert plain(shortened(value, better)) == shown


def test_an_interval_is_rounded_outwards() -> None:
    assert in_words(outwards((0.02, -0.00201, 0.04201))) == "+2.0 % (-0.3 to +4.3)"
    assert in_words(outwards((0.0, -0.03, 0.03))) == "+0.0 % (-3.0 to +3.0)"


@pytest.mark.parametrize(
    ("value", "aim", "judged"),
    [
        (250, at_most(250), "reached"), (251, at_most(250), "not reached"), (0, at_most(0), "reached"),
        (1, at_most(0), "not reached"), (50, at_least(50), "reached"), (49.9, at_least(50), "not reached"),
        ({"TTFT": (0.01, -0.03, 0.03)}, within(0.03), "reached"),
        ({"TTFT": (0.02, -0.002, 0.031)}, within(0.03), "open: intervals reach beyond it"),
        ({"TTFT": (0.05, 0.031, 0.08), "TPOT": (0, 0, 0)}, within(0.03), "not reached: TTFT"),
        ({"throughput": (-0.05, -0.08, -0.031)}, within(0.03), "not reached: throughput"),
    ],
)  # fmt: skip
def test_an_aim_is_reached_missed_or_open(value: Any, aim: Any, judged: str) -> None:
    assert aim.judged(value) == judged


def test_a_row_judges_the_figure_that_it_shows() -> None:
    row = Row(
        "so long", " ns", lambda found: found["ns"], at_most(250), more=lambda _: ", once", caveat=lambda _: "; here"
    )

    assert row.cells({"ns": 250.04}) == ("so long", "251 ns, once", "at most 250 ns", "not reached; here")
    assert row.cells({"ns": 1e-5}) == ("so long", "0.00001 ns, once", "at most 250 ns", "reached; here")


@pytest.mark.parametrize("found", [None, {}])
def test_what_was_not_measured_is_said_so_and_not_judged(found: Any) -> None:
    row = Row("so long", " ns", lambda one: one["ns"], at_most(250), size=lambda one: one["size"])

    assert row.cells(found) == ("so long", "not measured", "at most 250 ns", "")


# Tables ------------------------------------------------------------------------------------------------


def test_the_readmes_table_with_nothing_measured_has_its_aims() -> None:
    said = figure_tables.short({})

    assert said.startswith("Nothing has been measured yet")
    assert said.count("| not measured | ") == len(figure_tables.SHORT)
    assert "| at most 250 ns | |" in said


def test_the_readmes_table_says_when_and_where_it_was_measured() -> None:
    entries = {"ingest": entry(FOUND["ingest"]), "switched": entry(FOUND["switched"], when="2026-12-01T00:10:00+00:00")}

    said = figure_tables.short(entries)

    assert said.startswith(
        "Measured on 2026-11-30 to 2026-12-01 at commit 0123456789, on 2 cores of A Processor, "
        "which read their clock in 62 to 105 ns:\n\n| what |"
    )
    assert (
        "| spool to store, all in, 4,000,000 events | 1.17 million events/s, 0.542 of DuckDB's own Arrow insert "
        "| at least 1 million events/s | reached |"
    ) in said
    assert (
        "381 requests a side | TTFT +2.0 % (-0.2 to +4.2), TPOT +1.0 % (+0.0 to +2.0), "
        "throughput +0.0 % (-1.0 to +1.0), processor time +0.0 % (+0.0 to +0.0) "
        "| no effect, within 3 % | open: intervals reach beyond it |"
    ) in said
    assert said.count("not measured") == len(figure_tables.SHORT) - 3


def test_an_aim_for_a_larger_store_is_judged_with_that_remark() -> None:
    assert "| at most 5 s | reached; set for 100 million events |" in figure_tables.of(
        "publication", entries={"publication": entry(FOUND["publication"])}
    )


def test_every_run_is_told_with_its_command() -> None:
    said = figure_tables.runs({"ingest": entry(FOUND["ingest"])})

    assert (
        "| `python -m tests.bench_ingest --figures docs/figures.json` | 2026-11-30 17:40 | 12 s | 0123456789 "
        "| 2 of A Processor, 16 GiB | 62 to 105 ns | 0.1 and 1.2 |"
    ) in said
    assert "| `switched` | not measured |" in said


@pytest.mark.parametrize("name", FOUND)
def test_every_row_finds_its_figure(name: str) -> None:
    assert "not measured" not in figure_tables.of(name, entries={name: entry(FOUND[name])})


def test_every_row_finds_its_figure_in_what_the_quick_benches_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_attribution, "WANTED_OF_REQUESTS", 2_000)
    found = {
        "emit": bench_emit.measure(2_000, tmp_path),
        "attribution": [bench_attribution.measure(2_000, tmp_path)],
        "queries": bench_queries.measure(recorded(tmp_path / "run.duckdb", push()), ["causes", "ttft_by_length"]),
    }
    entries = {name: entry(one) for name, one in figures.rounded(found).items()}

    assert "not measured" not in figure_tables.of(*entries, entries=entries)
    assert re.search(r"\| 2,000 \| 0.1 million \| .* s \|", figure_tables.attribution(entries))
    assert "`causes`" in figure_tables.queries(entries)


# What is committed -------------------------------------------------------------------------------------


class AcceptedError(Exception):
    """A bench took its arguments and would measure now."""


@pytest.fixture
def accepting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def begin(path: Path | None) -> None:
        raise AcceptedError(path)

    monkeypatch.setattr(figures, "Run", begin)
    return monkeypatch


def made_commands() -> list[str]:
    """Return the commands of the Makefile that keep figures."""
    text = (figures.ROOT / "Makefile").read_text(encoding="utf-8").replace("$(FIGURES)", "docs/figures.json")
    return re.findall(r"@\$\(BIN\)/(python -m tests\.bench_\w+ .*--figures .+)$", text, re.MULTILINE)


def test_the_commands_of_make_figures_and_of_what_is_kept_exist(accepting: pytest.MonkeyPatch) -> None:
    commands = [*made_commands(), *(one["command"] for one in figures.load().values())]
    assert len(commands) >= 10

    for command in commands:
        python, option, module, *words = shlex.split(command)
        assert (python, option) == ("python", "-m")
        accepting.setattr(sys, "argv", [module, *words])
        with pytest.raises(AcceptedError) as accepted:
            importlib.import_module(module).main()
        assert accepted.value.args == (Path("docs/figures.json"),), command


def test_the_figures_that_are_kept_are_well_formed() -> None:
    for name, one in figures.load().items():
        assert name in figure_tables.ROWS
        assert one.keys() == entry(None).keys(), name
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", one["when"]), name
        assert re.fullmatch(r"[0-9a-f]{10}( and changes)?", one["commit"]), name
        assert one["machine"].keys() == MACHINE.keys(), name
        assert all(0 < reading < 10_000 for reading in one["machine"]["clock_ns"]), name
        assert all(row.cells(one["found"]) for row in figure_tables.ROWS[name].values())
        assert not re.search(r"/(tmp|home|work|root)/", json.dumps(one)), name


def test_two_sittings_that_differ_say_little_of_all_sittings() -> None:
    """Means 1 % off their own mean, and the 12.7 standard errors that a mean of two needs."""
    mean, low, high = bench_serving.among([0.01, -0.01])
    assert mean == 0.0
    assert (math.log1p(low), math.log1p(high)) == pytest.approx((-0.12706, 0.12706), rel=1e-3)
