"""Programs of others that the dashboards' tests use, and where `make dashboards-test` puts those it installs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / ".dashboards"
MISSING = "make dashboards-test installs it"


def found(name: str, *places: Path) -> str:
    """Return the path of a program; skip the test where it is neither set up nor on PATH.

    With KVTRACE_DASHBOARDS=required it fails instead.
    """
    for place in places:
        if place.exists():
            return str(place)
    on_path = shutil.which(name)
    if on_path is None:
        say = pytest.fail if os.environ.get("KVTRACE_DASHBOARDS") == "required" else pytest.skip
        say(f"{name} is not here; {MISSING}")
    return str(on_path)


def promtool() -> str:
    """Return the path of promtool."""
    return found("promtool", HOME / "prometheus" / "usr" / "bin" / "promtool")


def prometheus() -> str:
    """Return the path of Prometheus."""
    return found("prometheus", HOME / "prometheus" / "usr" / "bin" / "prometheus")


def chromium() -> str:
    """Return the path of Chromium."""
    return found(os.environ.get("CHROMIUM", "chromium"))


def old_duckdb_python() -> str:
    """Return the Python of the environment that has DuckDB 1.5."""
    return found("python-with-duckdb-1.5", HOME / "duckdb" / "bin" / "python")


def page() -> Path:
    """Return the folder of the page that draws panels with Grafana's packages."""
    script = HOME / "render" / "page.js"
    found("page.js", script)
    return script.parent
