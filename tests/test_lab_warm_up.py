"""A lab's engines serve their first requests before they are measured, or it is said at once that one cannot."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtrace.errors import LabError
from kvtrace.lab import model, warm_up, workload
from kvtrace.lab.engine import Engine
from tests.waiting import LONG_S


def engines(*names: str) -> list[Engine]:
    return [cast("Engine", SimpleNamespace(name=name, url=f"http://{name}", log=f"{name}.log")) for name in names]


def served(error: str = "") -> Any:
    return SimpleNamespace(records=[SimpleNamespace(error=error)])


def test_every_engine_serves_one_prompt_of_the_length_to_come_and_then_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def run(url: str, *, quiet: bool, **settings: Any) -> Any:
        assert quiet
        assert settings["seed"] != workload.SEED
        asked.append((url, settings["requests"], settings["input_len"]))
        return served()

    monkeypatch.setattr(workload, "run", run)
    warm_up.serve(engines("p"), 600)
    warm_up.serve(engines("d"), 10 * model.CONTEXT_TOKENS)

    assert [asked[0], asked[2]] == [("http://p", 1, 600), ("http://d", 1, model.CONTEXT_TOKENS - 3)]
    assert all(requests > 1 and length <= 16 for _, requests, length in (asked[1], asked[3]))


def test_an_engine_that_cannot_is_told_of_although_another_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()

    def run(url: str, **_settings: Any) -> Any:
        if url == "http://d":
            return served("HTTP 500")
        assert hanging.wait(LONG_S), "waited for the other engine first"
        return served()

    monkeypatch.setattr(workload, "run", run)
    try:
        with pytest.raises(LabError, match=r"d cannot serve its first requests: HTTP 500 \(see d\.log\)"):
            warm_up.serve(engines("p", "d"), 600)
    finally:
        hanging.set()
