"""The board Hand-off: what requests wait for, and how their KV travels."""

from __future__ import annotations

from kvtrace.dashboards.handoff.columns import (
    CLASS,
    COORDINATION,
    MODE,
    PAIR,
    REQUESTS,
    SHARE,
    TRANSFER,
)
from kvtrace.dashboards.panels import Column, Panel, table


def causes() -> list[Panel]:
    """Return the panels about what requests wait for."""
    return [
        table(
            "Causes, costliest first",
            "see what to remedy: the cause at the top, with what usually helps",
            "causes",
            [
                MODE,
                Column("scope"),
                Column("cause", width=170),
                CLASS,
                REQUESTS,
                SHARE,
                Column("total_ms", "total", "ms"),
                Column("p50_ms", "p50", "ms"),
                Column("p99_ms", "p99", "ms"),
                Column("remedy", width=420),
            ],
            height=11,
            note="A remedy is a supposition, and none holds while more is offered than served.",
        ),
    ]


def unseen() -> list[Panel]:
    """Return the panels about noticing what has arrived, and what is hidden beside the path."""
    return [
        table(
            "Noticing what has arrived",
            "tell whether D's steps quantise the hand-off: waits of about half a step say so",
            "detection",
            [
                MODE,
                Column("decode_engine", "D"),
                REQUESTS,
                Column("detection_p50_ms", "detection p50", "ms"),
                Column("detection_p99_ms", "p99", "ms"),
                Column("bracket_p50_ms", "bracket p50", "ms"),
                Column("step_p50_ms", "step of D p50", "ms"),
                Column("steps_p50", "in steps"),
                Column("within_a_step_share", "within a step", "percentunit"),
            ],
            width=14,
            height=6,
        ),
        table(
            "Detection, how many waited how long",
            "see whether waits gather at one length",
            "detection_spread",
            [
                Column("from_ms", "from", "ms"),
                Column("to_ms", "to", "ms"),
                REQUESTS,
                Column("share", unit="percentunit", colour=COORDINATION, bar=True),
            ],
            width=10,
            height=6,
        ),
        table(
            "Hidden beside the path",
            "see what delays nobody yet, and how little is missing",
            "hidden_work",
            [
                Column("cause"),
                CLASS,
                REQUESTS,
                Column("p50_ms", "p50", "ms"),
                Column("p99_ms", "p99", "ms"),
                Column("slack_p50_ms", "slack p50", "ms"),
                Column("slack_min_ms", "slack min", "ms"),
            ],
            height=6,
        ),
    ]


def transfers() -> list[Panel]:
    """Return the panels about transfers and handshakes."""
    return [
        table(
            "Posting against the wire",
            "tell whether descriptors or the network cost more",
            "posting",
            [
                MODE,
                *PAIR,
                REQUESTS,
                Column("post_p50_ms", "post p50", "ms"),
                Column("wire_p50_ms", "wire p50", "ms"),
                Column("wire_high_p50_ms", "wire at most p50", "ms"),
                Column("post_share", "post of both", "percentunit", TRANSFER, bar=True),
                Column("post_share_low", "at least", "percentunit"),
                Column("descriptors_p50", "descriptors p50"),
                Column("post_us_per_descriptor", "post per descriptor", "µs"),
                Column("moved_mib_p50", "moved p50", "mbytes"),
            ],
            height=6,
        ),
    ]


def by_engine() -> list[Panel]:
    """Return the panels that compare the engines that drive transfers."""
    return [
        table(
            "Transfers by the engine that drives them",
            "see failures, and how closely polls tell when the wire ended",
            "transfers",
            [
                Column("engine"),
                Column("transfers"),
                Column("failed"),
                Column("unfinished"),
                Column("moved_mib", "moved", "mbytes"),
                Column("descriptors_p50", "descriptors p50"),
                Column("post_p50_us", "post p50", "µs"),
                Column("post_p99_us", "post p99", "µs"),
                Column("done_at_post_share", "done at once", "percentunit"),
                Column("bracket_p50_ms", "bracket p50", "ms"),
                Column("seen_p50_ms", "seen p50", "ms"),
                Column("seen_p99_ms", "seen p99", "ms"),
            ],
            height=6,
        ),
        table(
            "Descriptors and bytes",
            "see whether many small descriptors make posting slow",
            "descriptors",
            [
                Column("engine"),
                Column("descriptors_from", "descriptors from"),
                Column("descriptors_to", "to"),
                Column("transfers"),
                Column("moved_mib_p50", "moved p50", "mbytes"),
                Column("kib_per_descriptor", "per descriptor", "kbytes"),
                Column("post_p50_us", "post p50", "µs"),
                Column("post_ns_per_descriptor", "post per descriptor", "ns"),
                Column("seen_p50_ms", "seen p50", "ms"),
                Column("gb_per_s_low", "GB/s at least"),
            ],
            height=6,
        ),
    ]


def peers() -> list[Panel]:
    """Return the panels about ranks and handshakes."""
    return [
        table(
            "By rank",
            "find the rank that all others wait for",
            "transfers_by_rank",
            [
                Column("engine"),
                Column("peer"),
                Column("rank"),
                Column("transfers"),
                Column("failed"),
                Column("moved_mib", "moved", "mbytes"),
                Column("post_p50_us", "post p50", "µs"),
                Column("seen_p50_ms", "seen p50", "ms"),
                Column("seen_p99_ms", "seen p99", "ms"),
                Column("last_share", "was last", "percentunit"),
            ],
            width=14,
            height=6,
        ),
        table(
            "Handshakes",
            "see what the first requests of a pair paid",
            "handshakes",
            [
                Column("engine"),
                Column("peer"),
                Column("rank"),
                Column("handshakes"),
                Column("failed"),
                Column("p50_ms", "p50", "ms"),
                Column("max_ms", "max", "ms"),
            ],
            width=10,
            height=6,
        ),
    ]
