"""A store as Parquet files, one per table; with a choice, the rows that belong to it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace import schema
from kvtrace.errors import DamageError, ExportError
from kvtrace.exporters import source
from kvtrace.schema.keeping import FINE_NS
from kvtrace.store import Store
from kvtrace.store.parquet import write_tables

if TYPE_CHECKING:
    from kvtrace.exporters.source import Choice

_MARGIN_NS = 2_000_000_000


_TIMED = {
    "event": "t_ns", "notable": "t_ns", "step": "coalesce(scheduled_ns, started_ns)", "leg": "first_ns",
    "transfer": "coalesce(post_started_ns, prepared_ns)",
}  # fmt: skip
COUNTED = {
    name: f"from_ns >= $from AND from_ns <= $to - {length}"
    for name, length in (("occurrence", FINE_NS), ("tally", "window_ns"))
}
"""By table whose rows count all requests of a window of time, the condition that all of it is chosen."""


def write(store: Path, choice: Choice, folder: Path) -> dict[str, int]:
    """Write the files into `folder`, which may exist, and return the rows of each table. Nobody here has `store` open.

    The files appear all at once or not at all. Without a choice every table is whole. With one, the answers are those
    of the requests chosen, and the events everything that happened while these were under way. Tables `COUNTED` keep
    the windows that lie wholly in the time chosen, and none where requests are chosen by id.
    """
    conditions: dict[str, str] = {}
    params: dict[str, int | list[int] | None] = {}
    if not choice.is_everything:
        with Store.open(store) as opened:
            from_ns, to_ns = source.extent(opened, choice)
        params = {**choice.parameters(), "first": from_ns, "last": to_ns + _MARGIN_NS}
        of_chosen = f"request_key IN (SELECT request_key FROM request WHERE {source.CHOSEN})"  # noqa: S608 -- of ours
        conditions = dict.fromkeys(schema.ANSWERS, of_chosen)
        for table, time in _TIMED.items():
            conditions[table] = f"{time} BETWEEN $first AND $last"
        conditions |= COUNTED if choice.keys is None else dict.fromkeys(COUNTED, "false")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".kvtrace-", dir=folder) as unfinished:
            written = write_tables(store, Path(unfinished), conditions, params)
            for file in Path(unfinished).iterdir():
                file.replace(folder / file.name)
    except (OSError, DamageError) as error:
        if is_new:
            with contextlib.suppress(OSError):  # something is in it after all, or it was never made
                folder.rmdir()
        # What DuckDB cannot write it says of the store, in whose connection it happened.
        why = error.strerror if isinstance(error, OSError) else error
        raise ExportError(f"{folder} cannot be written: {why}; name another folder with -o") from error
    return written
