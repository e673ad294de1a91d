"""Switching delays on and off in a running lab: a file per point, in a folder per role."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SITE = Path(__file__).parent / "fault_site"
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
        return {role: {"PYTHONPATH": str(SITE), "KVTRACE_FAULTS": str(self._folder / role)} for role in ROLES}

    @contextmanager
    def on(self, settings: Settings) -> Iterator[None]:
        """Keep the named delays on while the block runs."""
        paths = [self._folder / role / point for role, point in settings]
        try:
            for path, value in zip(paths, settings.values(), strict=True):
                draft = path.with_name(f".{path.name}")
                draft.write_text(str(value))
                os.replace(draft, path)
            yield
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
