"""Where `kvtrace export` writes: what is refused, what is never overwritten, pipes, links, and in how much memory."""

from __future__ import annotations

import datetime as dt
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from kvtrace.exporters import otlp_json
from kvtrace.store import Store
from tests import exported
from tests.sample_store import empty_store
from tests.test_export import export
from tests.trace import push
from tests.waiting import LONG_S

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported.write(tmp_path_factory.mktemp("store") / "run.duckdb", push(name="kvt-push"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "otlp"], "--endpoint"),
        (["--format", "perfetto", "--endpoint", "http://x"], "belong together"),
        (["--format", "otlp", "--endpoint", "ftp://x"], "no OTLP endpoint"),
        (["--format", "otlp", "--endpoint", "http://x:99999"], "no OTLP endpoint"),
        (["--format", "perfetto", "--from", "yesterday"], "--from wants a time"),
        (
            ["--format", "perfetto", "--from", "2026-11-30", "--to", "2026-11-29"],
            "--from 2026-11-30 is not before --to",
        ),
        (["--format", "perfetto", "--requests", "nobody"], "nobody"),
        (["--format", "parquet", "-o", "-"], "name a folder"),
        (["--format", "perfetto", "-o", "/nowhere/x"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    store: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert export(store, *arguments) in (1, 2)

    message = capsys.readouterr().err
    assert message.startswith("kvtrace: error: ")
    assert message.count("\n") == 1
    assert said in message


@pytest.mark.parametrize("form", ["otlp-json", "perfetto", "parquet"])
def test_a_time_without_requests_says_when_there_are_some(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """What it says chooses all of them."""
    assert export(store, "--format", form, "-o", tmp_path / "none", "--from", "2030-01-01") == 0
    hint = re.search(r"no request .* starts in that time; .* do with (--from \S+ --to \S+)", capsys.readouterr().err)
    assert hint is not None

    assert export(store, "--format", form, "-o", tmp_path / "some", *hint[1].split()) == 0
    assert "1 request;" in capsys.readouterr().err


def test_nothing_is_overwritten_and_nothing_half_is_left(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.trace"
    target.write_text("mine")
    assert export(store, "--format", "perfetto", "-o", target) == 1
    assert export(store, "--format", "perfetto", "-o", tmp_path / "missing" / "x") == 1

    assert target.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_an_empty_store_exports_to_empty_files(tmp_path: Path) -> None:
    path = tmp_path / "empty.duckdb"
    path.write_bytes(empty_store())
    for form in ("perfetto", "otlp-json", "parquet"):
        assert export(path, "--format", form, "-o", tmp_path / form) == 0

    exported.Reader().parse((tmp_path / "perfetto").read_bytes())
    assert (tmp_path / "otlp-json").read_bytes() == b""


def test_the_store_itself_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by force, not by another of its names: it is the only copy of what was recorded."""
    own = exported.write(tmp_path / "own.duckdb", push(name="kvt-a"))
    before = own.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(own)
    for path in (own, link):
        assert export(own, "--format", "otlp-json", "-o", path, "--force") == 1
        assert "is the store that is exported" in capsys.readouterr().err

    assert own.read_bytes() == before
    assert link.is_symlink()


def test_an_export_that_is_ended_leaves_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_spans: object, out: BinaryIO, _resource: object) -> int:
        out.write(b"half")
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(otlp_json, "write", stopped)
    with pytest.raises(SystemExit) as ended:
        export(store, "--format", "otlp-json", "-o", tmp_path / "out")

    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_stays_one(store: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reading = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reading.start()
    assert export(store, "--format", "otlp-json", "-o", pipe) == 0
    reading.join(LONG_S)

    assert read[0].count(b"\n") == 1
    assert pipe.is_fifo()


def test_a_link_stays_and_its_file_is_replaced(store: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    target, link = tmp_path / "here" / "file", tmp_path / "link"
    link.symlink_to(target)
    assert export(store, "--format", "otlp-json", "-o", link) == 0
    first = target.read_bytes()
    target.write_text("old")
    assert export(store, "--format", "otlp-json", "-o", link, "--force") == 0

    assert link.is_symlink()
    assert target.read_bytes() == first
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("form", ["perfetto", "parquet"])
def test_a_name_that_is_too_long_is_said_plainly(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert export(store, "--format", form, "-o", tmp_path / ("x" * 300)) == 1

    message = capsys.readouterr().err
    assert "File name too long; name another" in message
    assert "unexpected" not in message
    assert export(store, "--format", "otlp-json", "-o", tmp_path / ("x" * 250)) == 0


def test_a_folder_without_room_is_named_and_not_left_behind(store: Path, tmp_path: Path) -> None:
    """DuckDB says it of the store that it reads, and the folder is what the user has to change."""
    script = (
        "import resource, sys; from kvtrace import cli; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500));"
        f"sys.exit(cli.main(['export', {str(store)!r}, '--format', 'parquet', '-o', {str(tmp_path / 'new')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.startswith(f"kvtrace: error: {tmp_path / 'new'} cannot be written: ")
    assert done.stderr.endswith("name another folder with -o\n")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_what_to_install(store: Path) -> None:
    script = (
        "import sys; sys.modules['perfetto'] = None\nfrom kvtrace import cli\n"
        f"sys.exit(cli.main(['export', {str(store)!r}, '--format', 'perfetto', '-o', '-']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "pip install 'kvtrace[perfetto]'" in done.stderr


# Size --------------------------------------------------------------------------------------------------------

_REQUESTS = 5_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of many requests of 20 segments each, made in SQL."""
    path = tmp_path_factory.mktemp("large") / "large.duckdb"
    path.write_bytes(empty_store())
    with Store.open(path, "write") as opened:
        opened.execute(
            "INSERT INTO request BY NAME SELECT i AS request_key, 'kvt-' || i AS request_id, 0 AS attempt, "
            "'push' AS mode, 'complete' AS verdict, 'router' AS scope, 'p' AS prefill_engine, 'd' AS decode_engine, "
            "1000000000000000000 + i * 1000000 AS start_ns, start_ns + 20000000 AS first_token_ns, "
            "start_ns + 50000000 AS end_ns, 20000000 AS ttft_ns FROM range($n) AS t(i)",
            {"n": _REQUESTS},
        )
        opened.execute(
            "INSERT INTO segment BY NAME SELECT request_key, p AS position, 'wire' AS cause, 'transfer' AS class, "
            "'transfer' AS \"where\", start_ns + p * 1000000 AS start_ns, start_ns + (p + 1) * 1000000 AS end_ns "
            "FROM request, range(20) AS t(p)"
        )
    return path


# Of a Parquet file DuckDB holds a row group while it is written, which is 122,880 rows.
@pytest.mark.parametrize(("form", "grows_kib"), [("perfetto", 10_000), ("otlp-json", 10_000), ("parquet", 40_000)])
def test_memory_does_not_grow_with_the_store(large: Path, tmp_path: Path, form: str, grows_kib: int) -> None:
    """Ten times as many requests take about as much memory; one process exports both, so its peak can only grow.

    The peak of its own memory: what getrusage says begins with that of the process which started it.
    """
    first = dt.datetime(2001, 9, 9, 1, 46, 40)  # noqa: DTZ001 -- UTC
    ends = [(first + dt.timedelta(milliseconds=count)).isoformat() for count in (_REQUESTS // 10, _REQUESTS)]
    script = (
        "import re, sys\nfrom pathlib import Path\nfrom kvtrace import cli\n"
        f"for end in {ends!r}:\n"
        f"    wanted = ['--format', {form!r}, '-o', {str(tmp_path)!r} + '/' + end, '--to', end]\n"
        f"    code = cli.main(['export', {str(large)!r}, *wanted])\n"
        "    print(code, re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    (small_code, small), (whole_code, whole) = (map(int, line.split()) for line in done.stdout.splitlines())

    assert (small_code, whole_code) == (0, 0), done.stderr
    assert whole < 1.1 * small + grows_kib, (small, whole)
