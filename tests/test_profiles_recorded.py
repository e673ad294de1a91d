"""`kvtrace record` with profiles: the whole way into files, a server that is away, options that exclude each other."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtrace import cli, profile_server, profiler
from kvtrace.store import Store
from tests.profile_pushes import exported
from tests.test_profiler import PROGRAM, is_near


def test_a_recorded_command_is_profiled_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: the switch below the command, real pyroscope-io, the receiver, the store, the export."""
    pytest.importorskip("pyroscope")
    monkeypatch.setenv("ENGINE", "e0")
    monkeypatch.setenv(profiler.RATE_VARIABLE, "100")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv(profiler.VARIABLE, raising=False)
    run, place = tmp_path / "run.duckdb", tmp_path / "kept"

    command = [sys.executable, "-c", PROGRAM, "works"]
    assert cli.main(["record", "-o", str(run), "--profile-dir", str(place), "--", *command]) == 0
    said = capsys.readouterr().err
    with Store.open(run) as store:
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
    found = exported(run, "--class", "transfer")

    assert facts["profiles.dir"] == str(place)
    assert f"profiles in {place}" in said
    assert profiler.VARIABLE not in os.environ
    assert {(role, name) for role, name, _ in found} == {("decode", "post")}
    assert is_near(sum(found.values()) / 1e9, 0.6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "http://x", "--profile-dir", "d"), "exclude each other"),
        (("--profile-grafana", "http://x"), "belongs to --profile URL"),
        (("--profile", "localhost:4040"), "http://HOST:PORT"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), *options, "--", "true"]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_said_and_the_store_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in profile_server._PROXIES:
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run.duckdb"
    options = ["--profile", "http://127.0.0.1:1", "--profile-grafana", "http://grafana"]
    assert cli.main(["record", "-o", str(run), *options, "--", "true"]) == 0
    with Store.open(run) as store:
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
    names: Any = ("profiles.url", "profiles.application", "profiles.grafana")

    assert "profiles are lost until it does" in capsys.readouterr().err
    assert [facts[name] for name in names] == ["http://127.0.0.1:1", "kvtrace", "http://grafana"]
