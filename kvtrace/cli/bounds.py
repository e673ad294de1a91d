"""How much of a recording is kept, as `record` is told: an age, a size, or neither."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from kvtrace.errors import UsageError

if TYPE_CHECKING:
    from kvtrace.collect.retention import Retention

RetainAge = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Drop what is older, such as 90m, 24h or 7d; at least 20m. All is kept if not given."
    ),
]
RetainSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Drop the oldest once the store holds more, such as 500MB or 20GB."),
]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"MB": 1_000_000, "GB": 1_000_000_000, "TB": 1_000_000_000_000}


def retention(age: str | None, size: str | None) -> Retention:
    """Return the bounds that two options state. Raises UsageError where they state none."""
    from kvtrace.collect.retention import LEAST_NS, Retention

    age_s = None if age is None else _number(age, "--retain-age", _SECONDS, "90m, 24h or 7d")
    size_bytes = None if size is None else int(_number(size, "--retain-size", _BYTES, "500MB or 20GB"))
    if age_s is not None and age_s * 1e9 < LEAST_NS:
        raise UsageError(
            f"--retain-age {age} is less than requests under way need: at least {LEAST_NS // 60_000_000_000}m"
        )
    return Retention(age_s, size_bytes)


def _number(value: str, option: str, units: dict[str, int], such_as: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", value)
    if found is None or found[2] not in units or not float(found[1]):
        raise UsageError(f"{option} {value!r} is not understood; write it like {such_as}")
    return float(found[1]) * units[found[2]]
