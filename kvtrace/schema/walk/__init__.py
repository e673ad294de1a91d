"""The second engine of attribution: the walk in SQL for all requests of a store at once, generated from the vocabulary.

`requests` and `segments` are SELECTs over the tables event and process. They answer for a request only where its events
fit a shape that they know, and then to the nanosecond as `kvtrace.attribution` does; else they say why not.
"""

from __future__ import annotations

from kvtrace.schema.shape import View, columns
from kvtrace.schema.walk.answers import requests, segments

__all__ = ["requests", "segments", "views"]


def views() -> tuple[View, View]:
    """Return the views `walk_request` and `walk_segment`; planning either takes a few tenths of a second."""
    span = "; NULL where it is not walked, or no first token came."
    shares = ("compute", "compute_run", "compute_queue", "coordination", "transfer", "transfer_low", "transfer_high")
    return (
        View(
            "walk_request",
            "The shares of every request, worked out by this view from the events.",
            columns(
                ("request_id", "VARCHAR", "The id that its front end was sent, or the engines' without its suffix."),
                ("client_request_id", "VARCHAR", "The id that the client sent; may repeat."),
                ("walked", "BOOLEAN", "Whether the view answers; else the row stands for all requests of that id."),
                ("unwalked", "VARCHAR", "Why it does not answer, NULL if it does: ask the reference walk."),
                ("mode", "VARCHAR", "push, pull, local or unknown."),
                ("scope", "VARCHAR", "Where the first token was seen: router or engine."),
                ("prefill_engine", "VARCHAR", "Engine id of P."),
                ("decode_engine", "VARCHAR", "Engine id of D."),
                ("start_ns", "BIGINT", "First moment seen, unix ns."),
                ("first_token_ns", "BIGINT", f"First content leaving for the client, unix ns{span}"),
                ("ttft_ns", "BIGINT", f"Time to first token{span}"),
                *((f"{share}_ns", "BIGINT", f"Share, as in table request{span}") for share in shares),
                ("unattributed_ns", "BIGINT", f"Share: time that no event explains{span}"),
            ),
            requests(),
        ),
        View(
            "walk_segment",
            "The critical path of every walked request; neighbours may have one cause.",
            columns(
                ("request_id", "VARCHAR", "Request it belongs to."),
                ("class", "VARCHAR", "compute.run, compute.queue, coordination, transfer or unattributed."),
                ("cause", "VARCHAR", "The finer name; the view `cause` says what it means."),
                ("where", "VARCHAR", "Where the time passed."),
                ("start_ns", "BIGINT", "Unix ns."),
                ("end_ns", "BIGINT", "Unix ns."),
            ),
            segments(),
        ),
    )
