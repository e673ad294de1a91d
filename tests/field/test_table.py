"""The table of field reports is whole, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = 56
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


class Row(NamedTuple):
    """One row of the table, as text."""

    number: str
    report: str
    kind: str
    shown: str
    proven: str
    test: str


def rows(text: str) -> list[Row]:
    """Return the table's rows, its head left out."""
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]


TEXT = (ROOT / "docs" / "field_reports.md").read_text(encoding="utf-8")
ROWS = rows(TEXT)


def test_all_reports_are_there_once_and_in_order() -> None:
    assert [row.number for row in ROWS] == [str(number) for number in range(1, REPORTS + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_row_says_what_is_shown_and_what_proves_it(row: Row) -> None:
    """What is not proven, or not wholly, says why; everything else names a test."""
    assert all((row.report, row.kind, row.shown))
    assert re.fullmatch(r"yes|partly: .+|no: .+", row.proven)
    assert bool(TEST.search(row.test)) == (not row.proven.startswith("no:"))


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(TEXT)
    found = {
        (file, node.name)
        for file in {file for file, _ in named}
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert set(named) - found == set()
    assert len(named) > REPORTS


def test_a_row_that_is_missing_or_names_no_test_is_seen() -> None:
    """The checks can fail: a table with a row taken out, and a row whose test is unknown."""
    assert len(rows(TEXT.replace("\n| 7 |", "\n7 |"))) == REPORTS - 1
    assert TEST.findall("`tests/field/test_ranks.py::test_nobody`") == [("tests/field/test_ranks.py", "test_nobody")]
