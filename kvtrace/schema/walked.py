"""The views of the second engine as every store holds them, over macros that give their SQL as text.

DuckDB binds what CREATE VIEW is given, which takes half a second for each of these statements, and writes and reads it
as a tree. `query` binds a text only when the view is read. So each view is made while its macro gives an empty SELECT
of the same columns, and then the macro is given the statement.
"""

from __future__ import annotations

from kvtrace.schema.shape import View, columns, quoted, text

_NOT_WALKED = "; NULL where it is not walked, or no first token came."
_SHARES = ("compute", "compute_run", "compute_queue", "coordination", "transfer", "transfer_low", "transfer_high")
_SHARED = "walk_common_sql"


def _macro(view: str) -> str:
    return f"{view}_sql"


def _view(name: str, doc: str, *rows: tuple[str, str, str]) -> View:
    return View(name, doc, columns(*rows), f"SELECT * FROM query({_macro(name)}())")  # noqa: S608 -- names of ours


WALK_REQUEST = _view(
    "walk_request",
    "The shares of every request, worked out by this view from the events.",
    ("request_id", "VARCHAR", "The id that its front end was sent, or the engines' without its suffix."),
    ("client_request_id", "VARCHAR", "The id that the client sent; may repeat."),
    ("walked", "BOOLEAN", "Whether the view answers; else the row stands for all requests of that id."),
    ("unwalked", "VARCHAR", "Why it does not answer, NULL if it does: ask the reference walk."),
    ("mode", "VARCHAR", "push, pull, local or unknown."),
    ("scope", "VARCHAR", "Where the first token was seen: router or engine."),
    ("prefill_engine", "VARCHAR", "Engine id of P."),
    ("decode_engine", "VARCHAR", "Engine id of D."),
    ("start_ns", "BIGINT", "First moment seen, unix ns."),
    ("first_token_ns", "BIGINT", f"First content leaving for the client, unix ns{_NOT_WALKED}"),
    ("ttft_ns", "BIGINT", f"Time to first token{_NOT_WALKED}"),
    *((f"{share}_ns", "BIGINT", f"Share, as in table request{_NOT_WALKED}") for share in _SHARES),
    ("unattributed_ns", "BIGINT", f"Share: time that no event explains{_NOT_WALKED}"),
)

WALK_SEGMENT = _view(
    "walk_segment",
    "The critical path of every walked request; neighbours may have one cause.",
    ("request_id", "VARCHAR", "Request it belongs to."),
    ("class", "VARCHAR", "compute.run, compute.queue, coordination, transfer or unattributed."),
    ("cause", "VARCHAR", "The finer name; the view `cause` says what it means."),
    ("where", "VARCHAR", "Where the time passed."),
    ("start_ns", "BIGINT", "Unix ns."),
    ("end_ns", "BIGINT", "Unix ns."),
)


def before_views() -> str:
    """Return the statements that make the views' macros, each of an empty SELECT as yet."""
    return "\n".join(
        f"CREATE MACRO {_macro(one.name)}() AS {text(_empty(one))};" for one in (WALK_REQUEST, WALK_SEGMENT)
    )


def _empty(view: View) -> str:
    listed = ", ".join(f"NULL::{column.sql_type} AS {quoted(column.name)}" for column in view.columns)
    return f"SELECT {listed} LIMIT 0"


def behind_views() -> str:
    """Return the statements that give the macros what the views are to say; what both begin with stands there once."""
    from kvtrace.schema.walk import answers  # generating the SQL takes a while, and only who makes a store wants it

    common = answers.common()
    macros = [
        f"CREATE MACRO {_SHARED}() AS {text(common)};",
        _comment(_SHARED, "What both views of the walk begin with."),
    ]
    for view, sql in ((WALK_REQUEST, answers.requests()), (WALK_SEGMENT, answers.segments())):
        rest = text(sql.removeprefix(common))
        macros.append(f"CREATE OR REPLACE MACRO {_macro(view.name)}() AS {_SHARED}() || {rest};")
        macros.append(_comment(_macro(view.name), f"The statement that view {view.name} stands for."))
    return "\n".join(macros)


def _comment(macro: str, doc: str) -> str:
    return f"COMMENT ON MACRO {macro} IS {text(doc)};"
