"""The store: one DuckDB file. Only this package imports duckdb.

The recorder writes a working file; what anybody opens is a published snapshot of it, put in place by an atomic
rename, since DuckDB keeps every other process out of a file that is being written. Other changes are made to a copy.
"""

from __future__ import annotations

from kvtrace.store import copies
from kvtrace.store.connection import Mode, Rows, Store
from kvtrace.store.files import discard, refuse_bytes, working_path
from kvtrace.store.refusal import duckdb_version
from kvtrace.store.revision import created, identity, revised

__all__ = [
    "Mode", "Rows", "Store", "copies", "created", "discard", "duckdb_version", "identity", "refuse_bytes", "revised",
    "working_path",
]  # fmt: skip
