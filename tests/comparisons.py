"""Recordings to compare: requests of a few causes, some of which take longer, and what is told of two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtrace.report import comparison, contrasts
from kvtrace.store import Store
from tests.sample_store import PUSH_PATH, Sample

Row = dict[str, Any]

FACTS = {"vllm": "0.32.0", "model": "tiny"}
HOSTILE = "[red]x[/red]\x1b[31m\r"
# By which so many ms a request's forward takes longer: 2 in the mean, and no two blocks of requests alike.
JITTER = (0, 1, 3, 2, 4, 0, 6, 0, 2, 1, 3)


def recording(
    count: int = 66, *, facts: dict[str, str] | None = None, jitter: int = 0, sample: Sample | None = None,
    longer: dict[str, int] | None = None, every_ms: int = 500, **values: Any,
) -> Sample:  # fmt: skip
    """Return requests of 102 ms in the mean, some of whose causes take so many ms `longer`."""
    sample = Sample(facts={**FACTS, **(facts or {})}) if sample is None else sample
    for number in range(count):
        extra = {**(longer or {}), "prefill.forward": JITTER[(number + jitter) % len(JITTER)]}
        path = tuple((c, kind, where, what, ms + extra.get(c, 0)) for c, kind, where, what, ms in PUSH_PATH)
        name = f"kvt-{len(sample.requests):03}"
        sample.add(name, path, start_ms=every_ms * number, **values)
        tail = 30 + JITTER[(number + jitter) % len(JITTER)]
        sample.add_pace(name, (("decode.token", "compute.run", tail), ("step.connector", "coordination", 2)), (10, 11))
    return sample


def compared(tmp_path: Path, run: Sample, against: Sample) -> Row:
    """Write both and return the comparison."""
    paths = run.write(tmp_path / "run.duckdb"), against.write(tmp_path / "against.duckdb")
    with Store.open(paths[0]) as one, Store.open(paths[1]) as other:
        return comparison.compare(one, other)


def told(document: Row) -> str:
    """Return the sentence and all cautions."""
    names = ("run.duckdb", "against.duckdb")
    return "\n".join([contrasts.sentence(document, names), *contrasts.cautions(document, names)])
