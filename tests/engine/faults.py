"""Switching delays on and off in a running lab: a file per point, in a folder per role."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.engine import sites

SITES = sites.paths("fault_site", "start_site")
ROLES = ("prefill", "decode", "router")
STOP = "stop"

Settings = Mapping[tuple[str, str], float | str]
"""(role, point) -> milliseconds to sleep, or STOP. The points are declared in fault_site/sitecustomize.py."""


class Faults:
    """The switches of one lab. All are off until set, and take effect from the next call of the patched function."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for role in ROLES:
            (folder / role).mkdir(parents=True)

    @property
    def environment(self) -> dict[str, dict[str, str]]:
        """Return, per role, the variables that put the patches into its processes."""
        return {role: {"PYTHONPATH": SITES, "KVTRACE_FAULTS": str(self._folder / role)} for role in ROLES}

    @contextmanager
    def on(self, settings: Settings) -> Iterator[list[float]]:
        """Keep the named delays on while the block runs; yield a list that in the end holds how long each was, ms.

        A delay that happened several times counts with the mean of them, one that never happened is not in the list.
        """
        held_ms: list[float] = []
        switches = {self._folder / role / point: str(value) for (role, point), value in settings.items()}
        marks = [switch.with_name(f".{switch.name}.fired") for switch in switches]
        try:
            for switch, value in switches.items():
                draft = switch.with_name(f".{switch.name}.draft")
                draft.write_text(value)
                draft.replace(switch)
            yield held_ms
            held_ms += [statistics.fmean(map(float, mark.read_text().split())) for mark in marks if mark.exists()]
        finally:
            for path in (*switches, *marks):
                path.unlink(missing_ok=True)
