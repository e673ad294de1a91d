"""The formats that can be imported: their names, and how a file's own is found from its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtrace.errors import SourceError, UsageError
from kvtrace.importers import aiperf, dynamo, lifecycle, vllm_bench

if TYPE_CHECKING:
    from kvtrace.importers.source import Source

FORMATS = (lifecycle.NAME, aiperf.NAME, vllm_bench.NAME, dynamo.NAME)
_RECOGNISED: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    (lifecycle.NAME, lifecycle.recognise),
    (dynamo.NAME, dynamo.recognise),
    (aiperf.NAME, aiperf.recognise),
    (vllm_bench.NAME, vllm_bench.recognise),
)


def format_of(source: Source, forced: str | None) -> str:
    """Return the format of a file: the one that the user names, else what its content shows."""
    if forced is not None:
        if forced not in FORMATS:
            raise UsageError(f"there is no format {forced}; there are {', '.join(FORMATS)}")
        return forced
    for name, recognise in _RECOGNISED:
        if recognise(source.head):
            return name
    if lifecycle.holds_lines(source):
        return lifecycle.NAME
    raise SourceError(
        f"{source.path} is of no known format ({', '.join(FORMATS)}); if it is, name it with --format; "
        "nothing was imported"
    )
