"""What the wire's bracket leaves open: how much more or less of a time may have been transfer, and where it matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrace.report.style import percent
from kvtrace.stages import DETECTION, UNKNOWN, Cause, Class
from kvtrace.wording import ms

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

Row = dict[str, Any]

MATERIAL_SHARE = 0.05
"""Of the whole: a bound of transfer that lies nearer, and leaves the largest class what it is, is not worth words."""
NOTE = (
    "Transfer lies between the bounds in brackets, since a wire ended somewhere between two polls: what may be wire "
    "above the share told counts for another class."
)


class Move(NamedTuple):
    """Time or share that may belong to transfer or not, and the class that would then be the largest, "" as before."""

    amount: float
    largest: str


def moves(parts: Mapping[str, float], low: float, high: float, rest: str) -> tuple[Move | None, Move | None]:
    """Return what transfer may gain from part `rest`, and lose to coordination; None each where it hardly matters.

    `parts` are those of the whole by class, compute as one; transfer lies between `low` and `high`.
    """
    gained = _move(parts, high - parts[Class.TRANSFER], rest)
    lost = _move(parts, low - parts[Class.TRANSFER], DETECTION.kind.value)
    return gained, lost


def _move(parts: Mapping[str, float], amount: float, rest: str) -> Move | None:
    moved = {**parts, Class.TRANSFER: parts[Class.TRANSFER] + amount, rest: parts[rest] - amount}
    before, after = (max(some, key=some.__getitem__) for some in (parts, moved))
    if not amount or (abs(amount) < MATERIAL_SHARE * sum(parts.values()) and before == after):
        return None
    return Move(abs(amount), after if after != before else "")


def of_request(request: Row, causes: AbstractSet[str]) -> tuple[Move | None, Move | None]:
    """Return `moves` of one request in ns; `causes` are those on its path."""
    return _moves(request, _rest(causes).kind.value)


def of_row(request: Row) -> str:
    """Return between what bounds one request's transfer lies, "" where it hardly matters; `sentence` says more."""
    if not any(_moves(request, DETECTION.kind.value)):
        return ""
    low, high = (percent(request[name], request["ttft_ns"]) for name in ("transfer_low_ns", "transfer_high_ns"))
    return f"{low.removesuffix(' %')} to {high}"


def _moves(request: Row, rest: str) -> tuple[Move | None, Move | None]:
    if request["transfer_low_ns"] is None or not request["ttft_ns"]:
        return None, None
    parts = {kind: request[f"{kind}_ns"] for kind in ("compute", "coordination", "transfer", "unattributed")}
    return moves(parts, request["transfer_low_ns"], request["transfer_high_ns"], rest)


def _rest(causes: AbstractSet[str]) -> Cause:
    """Return the cause that holds what may be wire: of a transfer that nobody recorded it is unattributed."""
    return DETECTION if DETECTION.name in causes else UNKNOWN


def sentence(request: Row, causes: AbstractSet[str]) -> str | None:
    """Return between what bounds one request's transfer lies, and what else that is; None where it hardly matters."""
    gained, lost = of_request(request, causes)
    if gained is None and lost is None:
        return None
    ttft_ns, rest = request["ttft_ns"], _rest(causes)
    low, high = (percent(request[name], ttft_ns) for name in ("transfer_low_ns", "transfer_high_ns"))
    is_unseen = gained is not None and rest is UNKNOWN
    why = "no whole transfer was recorded" if is_unseen else "the wire ended somewhere between two polls"
    told = [
        f"up to {ms(move.amount)} of what counts as {counted} may be {other}"
        + (f", which would make {move.largest} the largest part" if move.largest else "")
        for move, counted, other in ((gained, rest.name, "the wire"), (lost, "the wire", DETECTION.name))
        if move is not None
    ]
    return f"Transfer is between {low} and {high}, since {why}: {'; '.join(told)}."


def of_group(group: Row, percentile: str) -> str:
    """Return between what bounds the transfer around a percentile lies, "" where it hardly matters."""
    shares, bounds = group["shares"][percentile], group["transfer_bounds"][percentile]
    compute = shares[Class.RUN] + shares[Class.QUEUE]
    parts = {"compute": compute, **{kind: shares[kind] for kind in ("coordination", "transfer", "unattributed")}}
    if not any(moves(parts, bounds["low"], bounds["high"], Class.COORDINATION)):
        return ""
    return f"{percent(bounds['low'], 1)} to {percent(bounds['high'], 1)}"
