"""`kvtrace explain RUN --against OTHER` from the command line: the page, the JSON, the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace import cli
from kvtrace.report import comparison_page, contrasts
from tests.comparisons import HOSTILE, compared, recording
from tests.golden_files import check_golden
from tests.printed import plain_console, text_of
from tests.sample_store import MS


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "KVTRACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["explain", *map(str, arguments)])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of push.duckdb, pull.duckdb, quicker by a wait and of another vLLM, and engine.duckdb."""
    folder = tmp_path_factory.mktemp("stores")
    push = recording(longer={"stage.wait": 40}, facts={"vllm": "0.33.0"})
    push.add("kvt-away", (), verdict="aborted", start_ms=7)
    push.write(folder / "push.duckdb")
    recording(jitter=3, mode="pull").write(folder / "pull.duckdb")
    recording(scope="engine").write(folder / "engine.duckdb")
    return folder


@pytest.mark.parametrize("width", [60, 80])
def test_the_comparison_looks_like_the_golden(
    width: int, stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(stores)

    code, out, err = explain(capsys, "push.duckdb", "--against", "pull.duckdb")

    assert (code, err) == (0, "")
    check_golden(f"cli/against_{width}.txt", out)


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 240])
def test_the_comparison_fits_whatever_the_width_and_nothing_hurts_a_terminal(width: int, tmp_path: Path) -> None:
    run = recording(longer={"wire": 2_000}, facts={"model": HOSTILE}, mode=HOSTILE, verdict=HOSTILE)
    for segment in run.segments:
        if segment["cause"] == "wire":
            segment["cause"] = HOSTILE * 4
    document = compared(tmp_path, run, recording())
    console = plain_console(width)

    comparison_page.print_comparison(document, (f"a/{HOSTILE}{'y' * 300}.duckdb", "b/\n.duckdb"), console)

    text = text_of(console)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "\r" not in text
    assert "[red]x[/red]\\x1b[31m\\r" in text.replace("\n", "")


def test_a_cause_that_the_sentence_names_stands_in_the_table(tmp_path: Path) -> None:
    """Ten causes differ by more, none of them told apart; two that are come behind them."""
    document = compared(tmp_path, recording(longer={"wire": 3, "report": -1}), recording(jitter=3))
    (group,) = document["groups"]
    noise = {"run": 90 * MS, "against": MS, "difference": 89 * MS, "low": -MS, "high": 99 * MS, "told_apart": False}
    unsure = [{"cause": f"noise.{number}", "class": "coordination", **noise} for number in range(10)]
    document["groups"] = [{**group, "causes": [*unsure, *group["causes"]]}]
    console = plain_console(100)

    comparison_page.print_comparison(document, ("a", "b"), console)

    sentence, _, tables = text_of(console).partition("mean ms by cause")
    assert "most of it wire, " in sentence
    assert "in spite of report, " in " ".join(sentence.split())
    assert [line.split()[1] for line in tables.splitlines()[2:15]] == [
        *(f"noise.{number}" for number in range(10)), "wire", "report", "other",
    ]  # fmt: skip


def test_a_column_of_a_comparison_has_one_number_of_decimals(tmp_path: Path) -> None:
    """TPOT of 2 ms beside a TTFT of 100, and a cause that is told apart by 20 us."""
    run, against = recording(longer={"wire": 40}), recording(jitter=3)
    for sample in (run, against):
        for pace, request in zip(sample.pace, sample.requests, strict=True):
            pace["tpot_ns"] = request["tpot_ns"] = 2 * MS
    document = compared(tmp_path, run, against)
    causes = document["groups"][0]["causes"]
    causes[1] |= {"difference": 20_000, "low": 20_000, "high": 20_000, "told_apart": True}
    console = plain_console(120)

    comparison_page.print_comparison(document, ("a", "b"), console)

    blocks = text_of(console).split("\n\n")
    for title in ("ms ", "mean ms by class", "mean ms by cause"):
        (block,) = (block for block in blocks if block.startswith(title))
        assert len({len(found) for found in re.findall(r"\d\.(\d+)", block)}) == 1, block


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    console = plain_console(80, "ascii")

    comparison_page.print_comparison(compared(tmp_path, recording(), recording()), ("a", "b"), console)

    assert "# compute.run" in text_of(console)
    assert text_of(console).isascii()


def test_the_json_has_the_promised_shape(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capsys, stores / "push.duckdb", "--against", stores / "pull.duckdb", "--json")
    document = json.loads(out)
    found = document["comparison"]
    (group,) = found["groups"]

    assert (code, err) == (0, "")
    assert list(document) == ["schema", "run", "against", "comparison"]
    assert (document["run"]["vllm"], document["against"]["vllm"]) == ("0.33.0", "0.32.0")
    assert list(found) == [
        "sentence", "cautions", "load", "differs", "flags_known", "lost_records", "is_same", "is_recording", "groups",
        "not_compared",
    ]  # fmt: skip
    assert list(group) == [
        "sentence", "cautions", "run", "against", "no_intervals", "because_of", "ttft_ns", "tpot_ns", "prompt_tokens",
        "output_tokens", "classes", "causes", "verdicts",
    ]  # fmt: skip
    line = ["run", "against", "difference", "low", "high", "told_apart"]
    for name in ("ttft_ns", "tpot_ns", "prompt_tokens", "output_tokens"):
        assert list(group[name]) == ["mean", "p50", "p90", "p99"]
        assert all(list(one) == line for one in group[name].values())
    assert all(list(one) == ["cause", "class", *line] for one in group["causes"])
    assert all(list(one) == ["class", *line] for one in group["classes"])
    assert list(found["load"]["rates"]) == ["offered_rate_hz", "served_rate_hz"]
    assert sum(one["difference"] for one in group["causes"]) == group["ttft_ns"]["mean"]["difference"]


def test_stores_are_only_read(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [stores / "push.duckdb", stores / "pull.duckdb"]
    before = [path.read_bytes() for path in paths]

    assert explain(capsys, paths[0], "--against", paths[1])[0] == 0
    assert [path.read_bytes() for path in paths] == before
    assert sorted(path.name for path in stores.iterdir()) == ["engine.duckdb", "pull.duckdb", "push.duckdb"]


def test_a_store_against_itself_differs_in_nothing(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "push.duckdb").symlink_to(stores / "push.duckdb")
    for other in (stores / "push.duckdb", tmp_path / "push.duckdb"):
        code, out, err = explain(capsys, stores / "push.duckdb", "--against", other, "--json")
        found = json.loads(out)["comparison"]

        assert (code, err, found["is_same"]) == (0, "", True)
        assert {line["difference"] for line in found["groups"][0]["causes"]} == {0}
        assert found["sentence"].startswith("Nothing is told apart between ")


@pytest.mark.parametrize("extra", [["kvt-000"], ["--slowest", 3], ["--reconcile"]])
def test_what_is_about_single_requests_goes_with_no_comparison(
    extra: list[object], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(capsys, stores / "push.duckdb", *extra, "--against", stores / "pull.duckdb")

    assert (code, out) == (2, "")
    assert "it goes with no REQUEST, --slowest or --reconcile" in err


def test_an_error_names_the_store_that_it_is_about(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.duckdb").write_text("no database")
    long = "x" * 300
    for other, said in (
        ("none.duckdb", "does not exist"), ("text.duckdb", "is not a DuckDB file"), (long, "cannot be read: File name"),
    ):  # fmt: skip
        for paths in ((stores / "push.duckdb", tmp_path / other), (tmp_path / other, stores / "push.duckdb")):
            code, out, err = explain(capsys, paths[0], "--against", paths[1])

            assert (code, out) == (1, "")
            assert f"{tmp_path / other} {said}" in err


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_what_cannot_be_compared_says_so_and_is_no_success(
    extra: list[str], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = explain(capsys, stores / "push.duckdb", "--against", stores / "engine.duckdb", *extra)

    assert code == 1
    assert "No comparison: push.duckdb has requests of scope router" in out
    assert not extra or json.loads(out)["comparison"]["groups"] == []


@pytest.mark.parametrize(("count", "why"), [(66, None), (19, "few requests")])
def test_no_verdict_is_an_answer_as_manual_and_help_say(
    count: int, why: str | None, stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script learns from the JSON whether there is one."""
    few = recording(count, jitter=3).write(tmp_path / "few.duckdb")
    code, out, err = explain(capsys, stores / "push.duckdb", "--against", few, "--json")
    found = json.loads(out)["comparison"]
    _, promised, _ = explain(capsys, "--help")
    manual = " ".join((Path(__file__).parents[1] / "docs" / "use.md").read_text("utf-8").split())

    assert (code, err, found["groups"][0]["no_intervals"]) == (0, "", why)
    assert found["sentence"].startswith("No verdict: ") is (why is not None)
    assert "no verdict can be given is an answer too; the exit code is 1" in " ".join(promised.split())
    assert "No verdict is an answer, with exit code 0" in manual
    assert why is None or f"`{why}`" in manual


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    assert contrasts.called(("a/run.duckdb", "b/run.duckdb")) == ("a/run.duckdb", "b/run.duckdb")
    assert contrasts.called(("a/push.duckdb", "b/pull.duckdb")) == ("push.duckdb", "pull.duckdb")
    assert contrasts.called(("/mnt/runs/push/run.duckdb", "/mnt/runs/pull/run.duckdb")) == (
        "push/run.duckdb", "pull/run.duckdb",
    )  # fmt: skip
    assert contrasts.called(("run.duckdb", "./run.duckdb")) == ("run.duckdb", "./run.duckdb")
    assert contrasts.called(("a/run.duckdb", "a/run.duckdb")) == ("run.duckdb", "run.duckdb")


def test_long_names_that_differ_in_their_middle_stay_apart(tmp_path: Path) -> None:
    """A model's name and a flag's value too, of which the page shows no pages."""
    names = [f"the-same-beginning-of-a-long-name-{which}-and-the-same-end-of-it.duckdb" for which in "AB"]
    flags = [{"command": "vllm serve m --block-size " + "x" * 5_000 + which + "y" * 5_000} for which in "AB"]
    document = compared(tmp_path, recording(facts=flags[0]), recording(facts=flags[1]))
    console = plain_console(80)

    comparison_page.print_comparison(document, names, console)

    told = " ".join(text_of(console).split())
    for which in "AB":
        assert f" is …ame-{which}-and-the-same-end-of-it.duckdb," in told
    assert "command --block-size (…xxxxA" in told
    assert len(told) < 4_000
    assert len(document["differs"][0]["run"]) == 10_001


def test_a_reader_that_has_enough_is_no_error(stores: Path) -> None:
    """The reader is gone before anything is written: what is printed fits into a pipe that nobody has emptied."""
    paths = (str(stores / "push.duckdb"), str(stores / "pull.duckdb"))
    command = [sys.executable, "-m", "kvtrace", "explain", paths[0], "--against", paths[1]]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
