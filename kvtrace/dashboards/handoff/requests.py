"""The board Hand-off: the tokens after the first, and requests to look at."""

from __future__ import annotations

from kvtrace.dashboards.handoff.columns import (
    CLASS,
    COORDINATION,
    LAST_ATTEMPT_LINK,
    MODE,
    QUEUE,
    REQUEST_LINK,
    REQUESTS,
    RUN,
    SHARE,
    TRANSFER,
)
from kvtrace.dashboards.panels import Column, Panel, table, time_series
from kvtrace.palette import GREY


def pace() -> list[Panel]:
    """Return the panels about the tokens after the first."""
    return [
        time_series(
            "Time per token after the first",
            "see whether hand-offs slow down requests that are being answered",
            "tpot_over_time",
            [
                Column("tpot_p50_ms", "TPOT p50", colour=RUN),
                Column("tpot_p99_ms", "TPOT p99", colour=QUEUE),
                Column("itl_max_p99_ms", "longest pause p99", colour=GREY),
                Column("extension_us_per_token", "connector, per token", "µs", COORDINATION, axis="right"),
            ],
            unit="ms",
        ),
        table(
            "What passes the time between tokens",
            "tell decoding from others' prompts and from the connector",
            "itl_parts",
            [
                MODE,
                Column("cause"),
                CLASS,
                REQUESTS,
                SHARE,
                Column("ms_per_token", "per token", "ms"),
            ],
            width=12,
        ),
        table(
            "Slowest tokens",
            "find the requests whose tokens came slowest, and why",
            "tpot",
            [
                Column("request_id", link=LAST_ATTEMPT_LINK),
                Column("decode_engine", "D"),
                Column("tokens"),
                Column("tpot_ms", "TPOT", "ms"),
                Column("itl_max_ms", "longest pause", "ms"),
                Column("extension_ms", "connector", "ms"),
                Column("by_others_ms", "by others", "ms"),
                Column("mixed_ms", "beside prompts", "ms"),
            ],
            width=14,
        ),
        table(
            "Who made them slow",
            "find the requests whose transfers held others up",
            "blamed",
            [
                Column("request_id", link=LAST_ATTEMPT_LINK),
                MODE,
                Column("moved_bytes", "moved", "bytes"),
                Column("descriptors"),
                Column("victims"),
                Column("extension_ms", "in all", "ms"),
            ],
            width=10,
        ),
    ]


def slowest() -> list[Panel]:
    """Return the panels that lead to single requests."""
    return [
        table(
            "Slowest requests",
            "open one: a click on its id shows its waterfall",
            "slowest_requests",
            [
                Column("request_id", link=REQUEST_LINK, width=320),
                Column("attempt", width=70),
                Column("started"),
                MODE,
                Column("verdict"),
                Column("ttft_ms", "TTFT", "ms"),
                Column("compute_ms", "compute", "ms", RUN, bar=True),
                Column("coordination_ms", "coordination", "ms", COORDINATION, bar=True),
                Column("transfer_ms", "transfer", "ms", TRANSFER, bar=True),
                Column("unattributed_ms", "unattributed", "ms"),
                Column("top_cause", "top cause"),
                Column("top_cause_ms", "it took", "ms"),
            ],
            height=10,
            given={"limit": "50"},
        )
    ]
