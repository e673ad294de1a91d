"""Golden files: what a program printed once and a person found right. UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Assert that `text`, trailing blanks aside, is what tests/golden/NAME holds."""
    path = GOLDEN / name
    seen = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(seen, encoding="utf-8")

    assert seen == path.read_text(encoding="utf-8")
