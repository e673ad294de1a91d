"""`kvtrace record --lab`, the lab stood in for: what it is asked for, what is kept of it, how it ends."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

from kvtrace import cli
from kvtrace.errors import LabError
from kvtrace.lab import metrics, stack, workload
from tests.recorded_commands import answer
from tests.recordings import numbers, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


class FakeLab:
    """Stands in for engines and router: comes up at once."""

    arguments: dict[str, Any]

    def __init__(self, mode: str, **arguments: Any) -> None:
        FakeLab.arguments = {"mode": mode, **arguments}
        self.url = "http://lab"
        self.commands = {"prefill-0": "python -m vllm"}
        self.engines: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace lab and load; `answer` is called in the place of the load."""
    state: dict[str, Any] = {"answer": lambda count: count}
    monkeypatch.setattr(stack, "Lab", FakeLab)

    def drive(url: str, **settings: Any) -> Any:
        state["load"] = settings
        completed = state["answer"](settings["requests"])
        return SimpleNamespace(completed=range(completed), to_text=lambda: "figures of the load")

    monkeypatch.setattr(workload, "run", drive)
    return state


def test_a_lab_is_brought_up_as_asked_and_its_facts_are_kept(tmp_path: Path, lab: dict[str, Any]) -> None:
    store = tmp_path / "run.duckdb"
    asked = (
        "--lab pull --requests 3 --rate 5 --input-len 7 --output-len 2 --seed 9 --prefill 2 --decode 1 --verify-kv 0.2"
    )
    assert cli.main(["record", "-o", str(store), *asked.split()]) == 0
    assert FakeLab.arguments["mode"] == "pull"
    assert (FakeLab.arguments["prefill"], FakeLab.arguments["decode"]) == (2, 1)
    assert (FakeLab.arguments["verify_kv"], FakeLab.arguments["warm_up_tokens"]) == (0.2, 7)
    asked_load = {"requests": 3, "rate_qps": 5.0, "input_len": 7, "output_len": 2, "seed": 9}
    assert asked_load.items() <= lab["load"].items()
    assert answer(store, "SELECT value FROM run WHERE name = 'command.prefill-0'") == "python -m vllm"
    assert '"rate_qps": 5.0' in answer(store, "SELECT value FROM run WHERE name = 'workload'")
    assert not FakeLab.arguments["spool"].exists()


@pytest.mark.usefixtures("lab")
def test_the_command_that_is_kept_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "run.duckdb"
    monkeypatch.setattr("sys.argv", ["kvtrace", "record", "--otlp", "http://me:hush@host:4318"])

    assert cli.main(["record", "-o", str(store), "--lab", "pull", "--requests", "1"]) == 0
    assert answer(store, "SELECT value FROM run WHERE name = 'command'") == (
        "kvtrace record --otlp 'http://***@host:4318'"
    )


def test_what_engines_do_before_the_load_is_not_recorded(
    tmp_path: Path, lab: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WarmingUp(FakeLab):
        def __enter__(self) -> Self:
            write(self.arguments["spool"], 0, 5)
            lab["answer"] = lambda count: write(self.arguments["spool"], 5, 3) or count
            return self

    monkeypatch.setattr(stack, "Lab", WarmingUp)

    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), "--lab", "push"]) == 0
    assert numbers(tmp_path / "run.duckdb") == [5, 6, 7]


def test_what_the_labs_engines_say_of_themselves_is_kept_and_compared(
    tmp_path: Path, lab: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "read_once", lambda _engines: {"p0": {"requests finished": 5.0}})
    monkeypatch.setattr(metrics, "read", lambda _engines: {"p0": {"requests finished": 5.0, "transfers": 2.0}})
    store = tmp_path / "run.duckdb"
    assert cli.main(["record", "-o", str(store), "--lab", "push"]) == 0
    assert (
        answer(store, "SELECT value FROM run WHERE name = 'metrics.p0'")
        == '{"requests finished": 0.0, "transfers": 2.0}'
    )
    *_, first, unexplained, lacking, last = capfd.readouterr().err.splitlines()
    assert first.endswith("agree in 1 of 8 totals; 1 differs, 6 are explained:")
    assert "transfers of p0 (vLLM 2, the store 0), without explanation." in unexplained
    assert lacking.endswith("and 3 more, because this vLLM has no such metric.")
    assert last.endswith(f"all of them: kvtrace explain {store} --reconcile")


def test_that_no_engine_told_its_totals_is_said(
    tmp_path: Path, lab: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), "--lab", "push"]) == 0
    assert "no engine's /metrics answered before and after the load" in capfd.readouterr().err.splitlines()[-1]


def test_requests_that_fail_make_the_exit_code_1_and_the_store_is_kept(tmp_path: Path, lab: dict[str, Any]) -> None:
    lab["answer"] = lambda count: count - 1
    store = tmp_path / "run.duckdb"
    assert cli.main(["record", "-o", str(store), "--lab", "push"]) == 1
    assert store.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_lab_keeps_what_was_served(tmp_path: Path, lab: dict[str, Any], number: signal.Signals) -> None:
    def interrupted(_count: int) -> int:
        os.kill(os.getpid(), number)
        time.sleep(5)
        raise AssertionError("the signal did not arrive")

    lab["answer"] = interrupted
    store = tmp_path / "run.duckdb"
    assert cli.main(["record", "-o", str(store), "--lab", "push"]) == 128 + number
    assert store.exists()


def test_a_lab_that_does_not_come_up_leaves_no_store(
    tmp_path: Path, lab: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(_count: int) -> int:
        raise LabError("prefill-0 ended with exit code 1 while starting")

    lab["answer"] = failing
    store = tmp_path / "run.duckdb"
    assert cli.main(["record", "-o", str(store), "--lab", "push"]) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "kvtrace: error: prefill-0 ended with exit code 1 while starting"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == []
