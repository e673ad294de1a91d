"""The time per token after the first, in sentences: what made D's steps longer, and whose transfers those were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrace.report.style import milliseconds, percent
from kvtrace.stages import DECODE_MIXED, UNKNOWN
from kvtrace.wording import plural

if TYPE_CHECKING:
    from kvtrace.report.selection import Explained

Row = dict[str, Any]


def explanation(explained: Explained) -> str | None:
    """Return how one request's tokens came after the first; None where that is not known or there were none."""
    pace = explained.pace
    if pace is None or not pace["tpot_ns"]:
        return None
    decode_ns = pace["end_ns"] - pace["start_ns"]
    told = (
        f"After the first token: {plural(pace['tokens'], 'token')} in {milliseconds(decode_ns)} ms, "
        f"{milliseconds(pace['tpot_ns'])} ms each (TPOT); "
        f"the longest time between two was {milliseconds(pace['itl_max_ns'], pace['tpot_ns'])} ms."
    )
    return " ".join([told, *_made_longer(explained, decode_ns)])


def _made_longer(explained: Explained, decode_ns: int) -> list[str]:
    pace = explained.pace or {}
    told = []
    if pace["extension_ns"]:
        own = explained.request["request_id"]
        others = [row for row in explained.blame if row["blamed_request_id"] != own]
        by_others_ns = sum(row["extension_ns"] for row in others)
        whose = (
            f", {milliseconds(by_others_ns, decode_ns)} ms of it for {plural(len(others), 'other request')}"
            if others
            else ""
        )
        told.append(
            f"Connector work on D's forward thread made its steps {milliseconds(pace['extension_ns'], decode_ns)} ms "
            f"({percent(pace['extension_ns'], decode_ns)}) longer{whose}."
        )
    parts = {row["cause"]: row["duration_ns"] for row in explained.parts}
    if mixed_ns := parts.get(DECODE_MIXED.name):
        told.append(f"For {milliseconds(mixed_ns, decode_ns)} ms its steps worked on somebody's prompt too.")
    if unknown_ns := parts.get(UNKNOWN.name):
        told.append(f"{milliseconds(unknown_ns, decode_ns)} ms between steps are unattributed.")
    return told


def population_sentences(summary: Row) -> list[str]:
    """Return how the tokens after the first came in each mode, and what connector work cost them.

    `summary` is that of `kvtrace.report.tpot`.
    """
    told = []
    for group in summary["groups"]:
        median, tail = (milliseconds(group["tpot_ns"][name]) for name in ("p50", "p99"))
        told.append(
            f"After the first token, {group['mode']}: half of {plural(group['requests'], 'request')} took {median} ms "
            f"a token (TPOT) or less, 99 % {tail} ms or less. Connector work on the forward thread was "
            f"{percent(group['extension_ns'], group['decode_ns'])} of that time"
            + (
                f", {percent(group['by_others_ns'], group['extension_ns'])} of it for other requests' transfers."
                if group["by_others_ns"]
                else "."
            )
        )
    return told
