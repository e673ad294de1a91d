"""`kvtrace explain` from a store on disk to what it prints: goldens, the JSON shape, ids, colour."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace import cli
from tests.golden_files import check_golden
from tests.sample_store import MS, Sample, scaled

REQUEST_KEYS = [
    "request_id", "mode", "verdict", "scope", "client_request_id", "attempt", "join", "ttft_ns", "compute_ns",
    "compute_run_ns", "compute_queue_ns", "coordination_ns", "transfer_ns", "transfer_low_ns", "transfer_high_ns",
    "unattributed_ns", "start_ns", "first_token_ns", "end_ns", "prefill_engine", "decode_engine", "prompt_tokens",
    "output_tokens", "transfers", "moved_bytes", "descriptors", "crosses_hosts", "note", "segments", "hidden", "pace",
]  # fmt: skip
HOSTILE = "[red]x[/red]\x1b[31m\r\n" + "y" * 10_000


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "KVTRACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 24 push requests, two attempts of one client, one that was aborted, one hostile id."""
    sample = Sample(facts={"vllm": "0.32.0", "model": "tiny", "kvtrace": "0.1.0"})
    sample.add("kvt-01", client_request_id="chat-7")
    for factor in range(2, 25):
        sample.add(f"kvt-{factor:02d}", scaled(factor), start_ms=200 * factor)
    sample.add("kvt-a", client_request_id="again", start_ms=10_000)
    sample.add("kvt-b", client_request_id="again", attempt=1, start_ms=10_100)
    sample.add("kvt-c", (), verdict="aborted", start_ms=10_200)
    pull = (("prefill.forward", "compute.run", "prefill", "", 3),)
    sample.add(HOSTILE, pull, (), scope="engine", mode="pull", start_ms=10_300, client_request_id="[bold]\x07")
    return sample.write(tmp_path_factory.mktemp("store") / "run.duckdb")


def explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `kvtrace explain` and return exit code, stdout and stderr."""
    code = cli.main(["explain", *map(str, arguments)])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


@pytest.mark.parametrize("width", [60, 100, 160])
def test_one_request_looks_like_the_golden(
    width: int, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))

    code, out, err = explain(capsys, store, "kvt-01")

    assert (code, err) == (0, "")
    check_golden(f"cli/request_{width}.txt", out)


@pytest.mark.parametrize("width", [60, 100])
def test_the_population_looks_like_the_golden(
    width: int, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(store.parent)

    code, out, err = explain(capsys, store.name)

    assert (code, err) == (0, "")
    check_golden(f"cli/population_{width}.txt", out)


@pytest.mark.parametrize("columns", ["0", "-1", "wide", "²"])
def test_columns_that_are_no_width_are_passed_over(
    columns: str, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = explain(capsys, store, "kvt-01")
    monkeypatch.setenv("COLUMNS", columns)

    assert explain(capsys, store, "kvt-01") == plain


def test_a_findings_command_can_be_pasted(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a narrow terminal and from JSON, for a store whose name wants quoting and looks like an option."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(store, "-it's a run.duckdb")

    _, out, _ = explain(capsys, "./-it's a run.duckdb")
    shown = [line.removeprefix("   See: ") for line in out.splitlines() if line.startswith("   See: ")]
    answers = []
    for line in shown:
        (program, *words) = shlex.split(line)
        assert program == "kvtrace"
        assert cli.main(words) == 0
        answers.append(capsys.readouterr().out)

    assert "detection_p50_ms" in answers[0]
    assert answers[1].startswith("kvt-24\n")
    _, document, _ = explain(capsys, "./-it's a run.duckdb", "--json")
    (finding,) = json.loads(document)["summary"]["findings"]
    assert [finding["command"], finding["example_command"]] == shown


@pytest.mark.parametrize(
    "name", ["-x", "--help", "two words", "it's", "a\nb\\c", "\x1b[31m'\u202e$(id)`id`", "\U0001f600é", "y" * 300]
)
def test_the_command_of_a_findings_request_names_it_whatever_it_is_called(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell makes of it what finds the request, and no terminal is moved by it."""
    sample = Sample()
    for number in range(21):
        path = scaled(2) if number == 7 else scaled(1)
        sample.add(name if number == 7 else f"kvt-{number}", path, start_ms=10 * number, transfer_high_ns=10 * MS)
    run = sample.write(tmp_path / "a run.duckdb")

    _, out, _ = explain(capsys, run)
    line = next(line for line in out.splitlines() if line.startswith("   See: kvtrace explain "))
    listing = ["bash", "-c", f"printf '%s\\0' {line.removeprefix('   See: ')}"]
    words = subprocess.run(listing, capture_output=True, check=True).stdout.decode().split("\0")

    assert line.isprintable()
    assert words[:3] == ["kvtrace", "explain", str(run)]
    assert words[-2:] == [name, ""]
    _, document, _ = explain(capsys, "--json", *words[2:-1])
    assert [one["request_id"] for one in json.loads(document)["requests"]] == [name]


def test_the_json_of_one_request_is_the_golden(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(capsys, store, "kvt-01", "--json")
    document = json.loads(out)
    document["run"]["duckdb"] = "any"

    assert code == 0
    check_golden("cli/request.json", json.dumps(document["requests"] + [document["run"]], indent=1))


def test_the_json_has_the_promised_shape_and_exact_shares(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capsys, store, "--json")
    document = json.loads(out)

    assert (code, err) == (0, "")
    assert list(document) == ["schema", "run", "requests", "summary"]
    assert document["schema"] == 1
    assert document["run"]["vllm"] == "0.32.0"
    assert len(document["requests"]) == 28
    for request in document["requests"]:
        assert list(request) == REQUEST_KEYS
        if request["ttft_ns"] is not None:
            assert request["compute_ns"] == request["compute_run_ns"] + request["compute_queue_ns"]
            parts = ("compute_ns", "coordination_ns", "transfer_ns", "unattributed_ns")
            assert sum(request[part] for part in parts) == request["ttft_ns"]
            spans = [segment["end_ns"] - segment["start_ns"] for segment in request["segments"]]
            assert sum(spans) == request["ttft_ns"]
        for segment in request["segments"]:
            assert list(segment) == ["class", "cause", "where", "waited_for", "start_ns", "end_ns"]
        for work in request["hidden"]:
            assert list(work) == ["cause", "class", "duration_ns", "slack_ns"]


def test_json_keeps_hostile_ids_whole_and_text_escapes_and_shortens_them(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = explain(capsys, store, "[red]x", "--json")
    assert json.loads(out)["requests"][0]["request_id"] == HOSTILE

    code, out, _ = explain(capsys, store, "[red]x")
    assert code == 0
    assert out.startswith("[red]x[/red]\\x1b[31m\\r\\nyyy")
    assert "\x1b" not in out
    assert "client id [bold]\\x07" in out
    assert len(out.splitlines()[0]) <= 100


@pytest.mark.parametrize("name", ["kvt-01", "chat-7", "chat"])
def test_an_id_or_a_beginning_of_one_finds_the_request(
    name: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = explain(capsys, store, name, "--json")

    assert code == 0
    assert [request["request_id"] for request in json.loads(out)["requests"]] == ["kvt-01"]


@pytest.mark.parametrize("name", ["again", "aga"])
def test_a_client_id_that_repeats_explains_every_request_that_bears_it(
    name: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = explain(capsys, store, name)

    assert code == 0
    assert "2 requests bear the client id again" in out
    assert out.count("Of 100 ms to the first token") == 2

    _, out, _ = explain(capsys, store, name, "--json")
    assert [request["attempt"] for request in json.loads(out)["requests"]] == [0, 1]


def test_an_ambiguous_beginning_lists_candidates(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capsys, store, "kvt-0")

    assert (code, out) == (1, "")
    assert err.startswith(
        "kvtrace: error: 'kvt-0' begins 9 requests, name one of them: kvt-01 (client id chat-7), kvt-02,"
    )
    assert err.count("\n") == 1

    _, _, err = explain(capsys, store, "kvt-")
    assert "and 17 more" in err


@pytest.mark.parametrize("name", ["nobody", "", "kvt-01x", "%", "KVT-01", "\x1b[31m", "z" * 10_000])
def test_an_unknown_id_is_one_clear_line(name: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capsys, store, name)

    assert (code, out) == (1, "")
    assert err.startswith("kvtrace: error: no request is called or begins with")
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert len(err) - len(str(store)) < 300


def test_the_slowest_come_slowest_first_and_never_without_a_ttft(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = explain(capsys, store, "--slowest", 3, "--json")
    assert [request["ttft_ns"] for request in json.loads(out)["requests"]] == [2400 * MS, 2300 * MS, 2200 * MS]

    _, out, _ = explain(capsys, store, "--slowest", 1000, "--json")
    assert len(json.loads(out)["requests"]) == 27

    _, out, _ = explain(capsys, store, "--slowest", 2)
    assert out.count("critical path") == 2


def test_requests_without_a_client_id_are_not_said_to_share_one(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = explain(capsys, store, "--slowest", 2)

    assert "bear the client id" not in out


def test_a_request_and_slowest_exclude_each_other(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = explain(capsys, store, "kvt-01", "--slowest", 2)

    assert code == 2
    assert "exclude each other" in err


def test_a_store_without_requests_says_so_and_json_stays_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Sample().write(tmp_path / "none.duckdb")

    code, out, err = explain(capsys, path)
    assert (code, out) == (1, "")
    assert "holds no request" in err
    assert err.count("\n") == 1

    code, out, err = explain(capsys, path, "--json")
    assert code == 1
    assert json.loads(out)["requests"] == []
    assert err.count("\n") == 1


def test_a_single_request_is_a_population_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample()
    sample.add("kvt-1")

    code, out, _ = explain(capsys, sample.write(tmp_path / "one.duckdb"))

    assert code == 0
    assert "The one request had its first token after 100 ms" in out


def on_a_terminal(store: Path, environment: dict[str, str]) -> bytes:
    """Run `kvtrace explain` on a terminal of its own and return what came out."""
    leader, follower = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtrace", "explain", str(store), "kvt-01"],
        stdout=follower, stderr=follower, stdin=follower, env=variables | environment,
    )  # fmt: skip
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return seen


def test_a_terminal_gets_colour_and_no_color_takes_it_away(store: Path) -> None:
    coloured = on_a_terminal(store, {"TERM": "xterm-256color", "COLORTERM": "truecolor"})
    plain = on_a_terminal(store, {"TERM": "xterm-256color", "NO_COLOR": "1"})

    assert b"38;2;230;159;0m" in coloured  # coordination's orange
    assert b"38;" not in plain
    assert b"48;" not in plain


def test_json_output_loads_no_rich(store: Path) -> None:
    program = (
        "import sys; from kvtrace.cli import main; main(sys.argv[1:]);"
        "print('RICH', 'rich' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "explain", str(store), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stderr == "RICH False\n"
