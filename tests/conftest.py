"""What holds for all tests."""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from instrumented_connectors import starvation
from kvtrace.store import Store, opening
from tests import connector_doubles as doubles
from tests import recorded_commands

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("kvtrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtrace")

# A shell that starts the tests in the background has them ignore SIGINT, and every program that they start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what collecting made, which stays to the end, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


class _NeverStarved:
    """Has had a processor all the time."""

    def starved_ns(self) -> int:
        return 0


@pytest.fixture(scope="session", autouse=True)
def _the_tests_own_threads_are_not_starved() -> Iterator[None]:
    """Let observers that run in the tests' own process not say how busy the machine is; engines' own processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starvation, "_own", SimpleNamespace(kernel=_NeverStarved()))
        yield


@pytest.fixture(scope="session", autouse=True)
def _stores_from_one_mould(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let tests copy the first empty store that this process made, since 300 statements take a quarter of a second.

    Where it cannot be copied the store is made as ever, so that whatever is wrong with its place is found as ever.
    """
    create, mould = opening._create, tmp_path_factory.mktemp("mould") / "empty.duckdb"

    def copy(path: Path) -> None:
        if not mould.exists():
            create(mould)
        with suppress(OSError):
            unborn = path.with_name(f"{path.name}.copied")
            shutil.copyfile(mould, unborn)
            unborn.replace(path)
            return
        create(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "_create", copy)
        yield


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store without rows."""
    path = tmp_path_factory.mktemp("blank") / "run.duckdb"
    Store.open(path, "write").close()
    with Store.open(path) as opened:
        yield opened


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Return the folder that a recorder follows."""
    return tmp_path / "spool"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return where a recorder puts its store."""
    return tmp_path / "run.duckdb"


@pytest.fixture
def memory() -> doubles.Memory:
    """Return a tracer that keeps what observers of vLLM emit."""
    return doubles.Memory()


@pytest.fixture
def connector() -> doubles.Connector:
    """Return a double of vLLM's connector."""
    return doubles.Connector()


@pytest.fixture
def emitter(tmp_path: Path) -> list[str]:
    """Return the command of a program that emits, for `kvtrace record`."""
    return recorded_commands.written_emitter(tmp_path)


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep private spool folders inside the test's own folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    monkeypatch.setattr("tempfile.tempdir", None)
