"""Folders whose sitecustomize runs in the processes of a lab under test, before anything else there."""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).parent


def paths(*names: str) -> str:
    """Return the PYTHONPATH that holds these sites, each of which runs the next one."""
    folders = [_HERE / name for name in names]
    assert all((folder / "sitecustomize.py").is_file() for folder in folders)
    return os.pathsep.join(map(str, folders))
