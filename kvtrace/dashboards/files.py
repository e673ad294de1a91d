"""The files of the dashboards: what each holds, written to a folder or held against it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtrace.dashboards import alerts, live, provisioning, request
from kvtrace.dashboards.boards import Board
from kvtrace.dashboards.guide import guide
from kvtrace.dashboards.handoff import board as handoff
from kvtrace.errors import ExportError


def boards() -> tuple[Board, ...]:
    """Return the three boards."""
    return (live.board(), handoff.board(), request.board())


def files() -> Mapping[str, str]:
    """Return path below the folder -> text of every file."""
    known = boards()
    return {
        "README.md": guide(known),
        **{f"boards/{board.uid.replace('-', '_')}.json": board.text() for board in known},
        "kvtrace_alerts.yaml": alerts.rules(),
        "prometheus.yaml": provisioning.SCRAPING,
        "provisioning/datasources/kvtrace.yaml": provisioning.DATA_SOURCES,
        "provisioning/dashboards/kvtrace.yaml": provisioning.PROVIDERS,
        "docker-compose.yaml": provisioning.COMPOSE,
    }


def write(folder: Path) -> list[Path]:
    """Write all files below `folder` and return their paths; what else lies there stays."""
    written = []
    for name, text in files().items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ExportError(f"{path} cannot be written: {error.strerror}; name a folder of yours") from error
        written.append(path)
    return written


def stale(folder: Path) -> list[Path]:
    """Return the files below `folder` that are missing or not as `write` would write them."""
    return [folder / name for name, text in files().items() if _text(folder / name) != text]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
