"""The tables that are kept beside the events and the answers, brought up to date after every analysis.

What was touched since a time is worked out again from all its events, whenever those came; everything else stays as
it is, however large the store has become.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvtrace.schema import keeping as sql
from kvtrace.schema.kept import KEPT
from kvtrace.store import Store

_SETTLE_NS = 30_000_000_000  # so long after a window's end its requests are counted in, for the first time
_AT_ONCE = 20  # windows, so that the memory which a large store takes stays bounded
_EVER_NS = (1 << 63) - 1


def refresh(store: Store, since_ns: int | None = None, changed_ns: Iterable[int] = ()) -> None:
    """Bring the tables of `schema.KEPT` up to date with the events since that time (unix ns), or with everything.

    `changed_ns` are the starts of the requests whose answers have changed.
    """
    if since_ns is None:
        for table in KEPT:
            store.execute(f"DELETE FROM {table.name}")  # noqa: S608 -- names of ours
        _place(store)
        store.execute(sql.steps("true", "false"))
        store.execute(sql.legs("true"))
        store.execute(sql.transfers("true", "true", "true"))
        store.execute(sql.NOTABLE, {"since": 0})
        store.execute(sql.OCCURRENCES, {"since": 0})
        starts = store.rows("SELECT DISTINCT start_ns // $window * $window AS t FROM request", {"window": sql.FINE_NS})
        _tally(store, (row["t"] for row in starts))
        return
    since_ns = min([since_ns, *_place(store)])
    back_ns = since_ns - sql.LOOK_BACK_NS
    redone = sql.steps(sql.OF_TOUCHED_STEPS, sql.BEFORE_TOUCHED_STEPS)
    _rework(store, sql.TOUCHED_STEPS, sql.STEPS_FROM, sql.FORGET_STEPS, redone, since_ns)
    redone = sql.legs(sql.OF_TOUCHED_LEGS)
    _rework(store, sql.TOUCHED_LEGS, sql.LEGS_FROM, sql.FORGET_LEGS, redone, since_ns, back_ns)
    redone = sql.transfers(sql.OF_TOUCHED_TRANSFERS, "t_ns >= $from", sql.LEGS_OF_TOUCHED_TRANSFERS)
    _rework(store, sql.TOUCHED_TRANSFERS, sql.TRANSFERS_FROM, sql.FORGET_TRANSFERS, redone, since_ns, back_ns)
    store.execute("DROP TABLE touched")
    for forget, again, first_ns in (
        (sql.FORGET_NOTABLE, sql.NOTABLE, since_ns),
        (sql.FORGET_OCCURRENCES, sql.OCCURRENCES, since_ns // sql.FINE_NS * sql.FINE_NS),
    ):
        store.execute(forget, {"since": first_ns})
        store.execute(again, {"since": first_ns})
    _tally(store, _due(store, changed_ns))


def _rework(
    store: Store, touched: str, begun: str, forget: str, redone: str, since_ns: int, back_ns: int | None = None
) -> None:
    """Work the touched rows of one table out again, from the first event on that any of them has."""

    def given(statement: str, **more: int) -> dict[str, Any]:
        known = {"since": since_ns, "back": back_ns, **more}
        return {name: value for name, value in known.items() if f"${name}" in statement}

    store.execute(touched, given(touched))
    first_ns = store.select(begun, given(begun)).values[0][0]
    from_ns = since_ns if first_ns is None else min(since_ns, first_ns)
    store.execute(forget, given(forget))
    store.execute(redone, given(redone, **{"from": from_ns}))


def _place(store: Store) -> list[int]:
    """Note which core every process works for; return since when what was kept of some is wrong, unix ns."""
    now = {row["process"]: row for row in store.rows("SELECT process, core, engine FROM engine_process")}
    before = {row["process"]: row for row in store.rows("FROM place")}
    if now == before:
        return []
    store.execute("DELETE FROM place")
    store.execute("INSERT INTO place SELECT process, core, engine FROM engine_process")
    firsts = {row["process"]: row["first_ns"] for row in store.rows("SELECT process, first_ns FROM process")}
    # Of a process without events nothing is kept; engines that start say what they are little by little.
    moved = [row for process, row in before.items() if firsts.get(process) is not None and now[process] != row]
    since = []
    for row in moved:
        first_ns = firsts[row["process"]]
        known = {"first": first_ns, "engine": row["engine"], "core": row["core"]}
        store.execute("DELETE FROM leg WHERE engine = $engine AND first_ns >= $first", _without(known, "core"))
        store.execute(
            "DELETE FROM step WHERE process = $core AND least(scheduled_ns, started_ns, ended_ns) >= $first",
            _without(known, "engine"),
        )
        since.append(first_ns)
    return since


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


# Times by cause -------------------------------------------------------------------------------------------


def _due(store: Store, changed_ns: Iterable[int]) -> set[int]:
    """Return the fine windows to be counted: those that are over now, and earlier ones with changed requests."""
    done_ns = _tallied(store, sql.FINE_NS)
    rows = store.rows(
        "SELECT DISTINCT start_ns // $window * $window AS t FROM request WHERE start_ns >= $done "
        "AND start_ns < (SELECT max(start_ns) FROM request) - $settled - $window",
        {"window": sql.FINE_NS, "settled": _SETTLE_NS, "done": done_ns},
    )
    changed = {start_ns // sql.FINE_NS * sql.FINE_NS for start_ns in changed_ns}
    newest_ns = max((row["t"] for row in rows), default=0)
    return {row["t"] for row in rows} | {one for one in changed if one < max(done_ns, newest_ns)}


def _tally(store: Store, windows_ns: Iterable[int]) -> None:
    """Count the requests of some fine windows anew, and the coarse windows that hold these or have been filled."""
    due = sorted(windows_ns)
    for first_ns, end_ns in _runs(due, sql.FINE_NS):
        _counted_anew(store, sql.TALLY_FINE, sql.FINE_NS, first_ns, end_ns)
    done_ns, coarse_ns = _tallied(store, sql.FINE_NS), _tallied(store, sql.COARSE_NS)
    whole_ns = done_ns // sql.COARSE_NS * sql.COARSE_NS
    filled = {window_ns // sql.COARSE_NS * sql.COARSE_NS for window_ns in due}
    if whole_ns > coarse_ns:
        rows = store.rows(
            "SELECT DISTINCT from_ns // $coarse * $coarse AS t FROM tally "
            "WHERE window_ns = $fine AND from_ns >= $done AND from_ns < $whole",
            {"coarse": sql.COARSE_NS, "fine": sql.FINE_NS, "done": coarse_ns, "whole": whole_ns},
        )
        filled.update(row["t"] for row in rows)
    for first_ns, end_ns in _runs(sorted(one for one in filled if one < whole_ns), sql.COARSE_NS):
        _counted_anew(store, sql.TALLY_COARSE, sql.COARSE_NS, first_ns, end_ns)


def _counted_anew(store: Store, counted: str, window_ns: int, first_ns: int, end_ns: int) -> None:
    span = {"from": first_ns, "to": end_ns}
    store.execute(sql.FORGET_TALLY, {"window": window_ns, **span})
    store.execute(counted, span)


def _tallied(store: Store, window_ns: int) -> int:
    """Return until when table tally holds everything in windows of that length, unix ns."""
    return int(store.select(sql.TALLIED, {"window": window_ns}).values[0][0])


def _runs(windows_ns: list[int], length_ns: int) -> Iterator[tuple[int, int]]:
    """Yield stretches of adjacent windows, none too long."""
    first = 0
    for place, window_ns in enumerate(windows_ns, start=1):
        is_over = place == len(windows_ns) or windows_ns[place] != window_ns + length_ns
        if is_over or place - first == _AT_ONCE:
            yield windows_ns[first], window_ns + length_ns
            first = place


# What is left after old windows have gone -----------------------------------------------------------------


def window_of(t_ns: int) -> int:
    """Return where the fine window begins that a time lies in, unix ns."""
    return t_ns // sql.FINE_NS * sql.FINE_NS


def recount(store: Store, before_ns: int) -> None:
    """Count the coarse window anew of which everything before that time, where a fine one begins, has gone."""
    first_ns = before_ns // sql.COARSE_NS * sql.COARSE_NS
    if first_ns < before_ns and first_ns + sql.COARSE_NS <= _tallied(store, sql.FINE_NS):
        _counted_anew(store, sql.TALLY_COARSE, sql.COARSE_NS, first_ns, first_ns + sql.COARSE_NS)
