"""Engines shared by all tests of a mode: one lab at a time, push first, closed before the next one starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.deployment import Deployment

_MODES = ("push", "pull")


class Deployments:
    """Hands out the lab of a mode, and closes the other one first: two cores carry one lab."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Deployment | None = None

    def get(self, mode: str) -> Deployment:
        """Return the running lab of this mode, started if need be."""
        if self._open is None or self._open.mode != mode or self._open.lab.failed():
            self.close()
            self._folder.mkdir(exist_ok=True)
            number = sum(1 for _ in self._folder.iterdir())
            self._open = Deployment(mode, self._folder / f"{number}-{mode}").__enter__()
        return self._open

    def close(self) -> None:
        """Close the lab that runs, if one does."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of one mode together, those that break its engines last, so that each mode's engines start once.

    Tests with engines of their own come behind both.
    """
    positions = [position for position, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ordered = sorted((items[position] for position in positions), key=_turn)
    for position, item in zip(positions, ordered, strict=True):
        items[position] = item


def _turn(item: pytest.Item) -> tuple[int, bool]:
    mode = _mode(item)
    return (_MODES.index(mode) if mode else len(_MODES), "spent_deployment" in getattr(item, "fixturenames", ()))


def _mode(item: pytest.Item) -> str:
    """Return the mode that a test of this folder is about, "" for others."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or Path(__file__).parent not in item.path.parents:
        return ""
    mode = callspec.params.get("mode", "")
    return mode if mode in _MODES else ""


@pytest.fixture(scope="session")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployments]:
    """Hand out labs; none is left at the end."""
    labs = Deployments(tmp_path_factory.mktemp("labs"))
    yield labs
    labs.close()


@pytest.fixture
def deployment(deployments: Deployments, mode: str) -> Deployment:
    """Return the lab of the test's mode."""
    return deployments.get(mode)


@pytest.fixture
def spent_deployment(deployments: Deployments, mode: str) -> Iterator[Deployment]:
    """Return the lab of the test's mode, which the test may break."""
    yield deployments.get(mode)
    deployments.close()
