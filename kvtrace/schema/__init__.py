"""The store's schema: tables, views and comments as values, and the DDL text made from them.

The stage ENUM, the payload columns' comments and the two vocabulary views derive from `kvtrace.stages`, so
that a stage declared there is a stage here. Pure text: no database is imported.
"""

from __future__ import annotations

from functools import cache

from kvtrace import stages
from kvtrace.schema import walked
from kvtrace.schema.kept import KEPT
from kvtrace.schema.shape import Column, Table, View, median_ns, quantile_ns, quoted, text
from kvtrace.schema.tables import ANSWERS, TABLE_BY_NAME, TABLES, WORKED_OUT
from kvtrace.schema.views import VIEWS

__all__ = [
    "ANSWERS",
    "FORMAT",
    "KEPT",
    "SCHEMA_VERSION",
    "TABLES",
    "TABLE_BY_NAME",
    "VIEWS",
    "WORKED_OUT",
    "Column",
    "Table",
    "View",
    "ddl",
    "median_ns",
    "quantile_ns",
    "quoted",
    "text",
]

SCHEMA_VERSION = 6
"""Raised whenever a table or a view changes its columns or their meaning.

1  run, process, event, loss, spool_file, recorder, request, segment, hidden; the views that people and panels read.
2  pace, pace_part, blame; the views tpot and blamed.
3  idle_ns and lost_ns of request.
4  straggler_rank, straggler_ns, checked_blocks, corrupt_blocks and unchecked_blocks of request; router.traced.
5  transfer and step are tables, with peer, seen_ns, siblings and is_last, and gap_ns; place, leg, notable, occurrence
   and tally; post_ns, wire_ns, detection_ns, tpot_ns and decode_tokens of request; finding; view under_way;
   prompt_tokens and output_tokens are NULL where nobody told them.
6  walk_request and walk_segment, the attribution in SQL; cached_tokens and remote_tokens of request;
   starved_ns, forward_starved_ns, connector_starved_ns and result_starved_ns of step.
"""

FORMAT = "kvtrace"
"""The value of `format` in table run: what tells a store of ours from any other DuckDB file."""


@cache
def ddl() -> str:
    """Return the whole schema as SQL: one statement after another, each ended by a semicolon."""
    names = ",\n  ".join(text(stage.name) for stage in stages.STAGES)
    parts = [f"CREATE TYPE stage AS ENUM (\n  {names}\n);"]
    parts += [_table_ddl(table) for table in TABLES]
    parts += [walked.before_views(), *(_view_ddl(view) for view in VIEWS), walked.behind_views()]
    return "\n\n".join(parts) + "\n"


def _table_ddl(table: Table) -> str:
    columns = ",\n  ".join(f"{quoted(column.name)} {column.sql_type}" for column in table.columns)
    return f"CREATE TABLE {table.name} (\n  {columns}\n);\n" + _comments("TABLE", table.name, table.doc, table.columns)


def _view_ddl(view: View) -> str:
    return f"CREATE VIEW {view.name} AS\n{view.sql};\n" + _comments("VIEW", view.name, view.doc, view.columns)


def _comments(kind: str, name: str, doc: str, columns: tuple[Column, ...]) -> str:
    lines = [f"COMMENT ON {kind} {name} IS {text(doc)};"]
    lines += [f"COMMENT ON COLUMN {name}.{quoted(column.name)} IS {text(column.doc)};" for column in columns]
    return "\n".join(lines)
