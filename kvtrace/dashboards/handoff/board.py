"""The board Hand-off: where the time to first token goes, over time, per length, per pair, push against pull."""

from __future__ import annotations

from kvtrace.dashboards.boards import Board, chosen, run_source, typed
from kvtrace.dashboards.handoff import engines, requests, shares, waits
from kvtrace.dashboards.sources import text_of

UID = "kvtrace-handoff"
VARIABLES = (
    run_source(),
    chosen(
        "model",
        "Model",
        "Narrows the lists of P and D to the engines that serve it.",
        "SELECT DISTINCT map_extract(facts, 'model')[1] AS model FROM process"
        " WHERE map_extract(facts, 'model')[1] <> '' ORDER BY model",
    ),
    *(
        chosen(
            name,
            label,
            f"Only requests with this engine as {label}.",
            f"SELECT DISTINCT {name}_engine AS engine FROM request WHERE {name}_engine <> ''"  # noqa: S608 -- constants
            f" AND ({text_of('model')} IS NULL OR {name}_engine IN (SELECT map_extract(facts, 'engine_id')[1]"
            f" FROM process WHERE map_extract(facts, 'model')[1] = {text_of('model')})) ORDER BY engine",
        )
        for name, label in (("prefill", "P"), ("decode", "D"))
    ),
    chosen(
        "mode",
        "Connector",
        "Only requests whose KV was handed over so.",
        "SELECT DISTINCT mode FROM request ORDER BY mode",
    ),
    chosen(
        "scope",
        "Scope",
        "Where the first token was seen; scopes do not compare.",
        "SELECT scope FROM request WHERE scope <> '' GROUP BY scope ORDER BY count(*) DESC, scope",
        with_all=False,
    ),
    typed("ttft_target_ms", "TTFT target, ms", "The longest time to first token that is good; empty: any.", "500"),
    typed("tpot_target_ms", "TPOT target, ms", "The longest time per token that is good; empty: any.", "50"),
)


def board() -> Board:
    """Return the board."""
    return Board(
        UID,
        "kvtrace / Hand-off",
        "Where the time to first token goes when prefill and decode run on separate engines.",
        VARIABLES,
        {
            "This run": [*shares.run(), *shares.findings()],
            "Where the time to first token goes": [*shares.ttft(), *shares.groups()],
            "Push against pull, and the targets": [*shares.modes(), *shares.registrations()],
            "What requests wait for": [*waits.causes(), *waits.unseen()],
            "Transfers": [*waits.transfers(), *waits.by_engine(), *waits.peers()],
            "Engines and queues": [*engines.engines(), *engines.within()],
            "Blocks, leases, failures": [*engines.trouble(), *engines.blocks()],
            "After the first token": requests.pace(),
            "Requests": requests.slowest(),
            "Recording": engines.recording(),
        },
    )
