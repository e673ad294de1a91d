"""What the report prints of a sample: a console that keeps it, and one request or the population read back."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from kvtrace.report import population, selection
from kvtrace.store import Store
from tests.sample_store import Sample


def plain_console(width: int = 100, encoding: str = "utf-8") -> Console:
    """Return a console without colour that keeps what it is given."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False, no_color=True)


def text_of(console: Console) -> str:
    """Return what was printed to a console of `plain_console`."""
    console.file.flush()
    return console.file.buffer.getvalue().decode()  # type: ignore[attr-defined]


def one(tmp_path: Path, sample: Sample, key: int = 1) -> selection.Explained:
    """Write the sample and read one of its requests back."""
    with Store.open(sample.write(tmp_path / "run.duckdb")) as store:
        return next(iter(selection.explained(store, [key])))


def summary_of(tmp_path: Path, sample: Sample) -> dict:
    """Write the sample and return its population summary."""
    with Store.open(sample.write(tmp_path / "run.duckdb")) as store:
        return population.summary(store, selection.run_facts(store))
