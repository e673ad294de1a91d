"""From files to a store, all of them or none: read, join to what is known, leave out what is there, write, analyse."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from kvtrace import analyze, stages
from kvtrace.errors import SourceError
from kvtrace.findings import table
from kvtrace.importers import aiperf, clients, dynamo, formats, lifecycle, vllm_bench
from kvtrace.importers.identity import Known
from kvtrace.importers.source import Source, open_source
from kvtrace.store import Store, created, identity, revised
from kvtrace.store.amounts import leave_out_impossible
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvtrace.importers.points import Imported, Part, Placed

Key = tuple[object, ...]
Clock = tuple[str, str]

_STORED_SQL = """
SELECT e.t_ns, e.stage::VARCHAR AS stage, e.request, e.ref, e.a, e.b FROM event AS e JOIN process AS p USING (process)
WHERE map_extract(p.facts, 'imported')[1] IS NOT NULL
"""
_CLIENT_NAMED = (stages.ROUTER_RECEIVED, stages.CLIENT_SENT)  # their `ref` is the id that the client sent
_PROCESSES_SQL = "SELECT process, host, domain, offset_ns, facts FROM process ORDER BY process"


@dataclass(slots=True)
class Outcome:
    """What an import did: sentences by the file that each is about, and how much is new."""

    said: list[tuple[str, str]] = field(default_factory=list)
    points: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Before:
    """What the store holds before anything is added."""

    known: Known = field(default_factory=Known)
    stored: set[Key] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)
    clocks: dict[Clock, int] = field(default_factory=dict)

    @classmethod
    def load(cls, store: Store) -> _Before:
        before = cls(Known.load(store), set(store.select(_STORED_SQL).values))
        for row in store.rows(_PROCESSES_SQL):
            facts = dict(row["facts"] or {})
            if "imported" in facts:
                before.digests.add(facts.get("import_digest", ""))
            else:
                before.clocks[row["host"], row["domain"]] = row["offset_ns"] or 0
        return before


def import_files(
    files: Iterable[Path], into: Path | None, output: Path | None, *, force: bool, forced: str | None, same_host: bool
) -> Outcome:
    """Add files to the store `into`, or make the store `output` of them; raise and change nothing if one is wrong."""
    outcome = Outcome()
    before, seen = _Before(), None
    if into is not None:
        seen = identity(into)
        with Store.open(into) as store:
            before = _Before.load(store)
    sources = list(_fresh([open_source(file) for file in files], before, outcome))
    clock = _shared_clock(before, sources) if same_host else None
    imported = _read(sources, before, clock, forced)
    fresh = {one.source.digest: _new_points(one, before.stored) for one in imported}
    for one in imported:
        outcome.said.append((one.source.name, _told(one, len(fresh[one.source.digest]))))
        outcome.said += [(one.source.name, sentence) for sentence in one.said]
    outcome.points = sum(map(len, fresh.values()))
    if into is not None and not outcome.points:
        return outcome
    made = revised(into, seen) if into is not None else created(_named(output), force=force)
    with made as store:
        if left_out := leave_out_impossible(store):
            outcome.said.append((str(into), left_out))
        with store.transaction():
            _write(store, [one for one in imported if fresh[one.source.digest]], fresh, clock, outcome)
        with store.transaction():
            since_ns = None if left_out else _since_ns(store, fresh.values())  # with such, nothing may be answered yet
            outcome.requests = analyze.analyze(store, since_ns)
            table.write(store)
    return outcome


def _named(output: Path | None) -> Path:
    if output is None:
        raise SourceError("neither a store to add to nor one to make is named")
    return output


def _fresh(sources: list[Source], before: _Before, outcome: Outcome) -> Iterator[Source]:
    """Yield the files that are neither in the store nor given twice."""
    seen = set(before.digests)
    for source in sources:
        if source.digest in seen:
            outcome.said.append((source.name, "has been imported before and adds nothing"))
            continue
        seen.add(source.digest)
        yield source


def _shared_clock(before: _Before, sources: list[Source]) -> Clock:
    """Return the host and clock that all files are stated to be of: the store's own where it recorded any."""
    if len(before.clocks) > 1:
        raise SourceError(f"the store has processes of {len(before.clocks)} clocks, so --same-host does not say whose")
    if before.clocks:
        return next(iter(before.clocks))
    return (f"import:{sources[0].digest[:16]}" if sources else "import:", "0")


def _read(sources: list[Source], before: _Before, clock: Clock | None, forced: str | None) -> list[Imported]:
    """Return every file read and placed. Routers come first, since clients join them, and hashes of both come last."""
    chosen = [(source, formats.format_of(source, forced)) for source in sources]
    known = before.known
    found = [dynamo.read(source, known) for source, name in chosen if name == dynamo.NAME]
    offset_ns = before.clocks.get(clock) if clock is not None else None
    for source, name in chosen:
        if name == aiperf.NAME:
            found.append(clients.place(source, name, aiperf.read(source), known))
        elif name == vllm_bench.NAME:
            records, said = vllm_bench.read(source, offset_ns)
            found.append(clients.place(source, name, records, known))
            found[-1].said += said
    if any(name == lifecycle.NAME for _, name in chosen):
        for one in found:
            known.learn({point.request for point in one.points})
            known.learn({point.ref for point in one.points if point.ref and point.stage in _CLIENT_NAMED})
    logs = [lifecycle.read(source, same_host=clock is not None) for source, name in chosen if name == lifecycle.NAME]
    lifecycle.place(logs, known)
    return [*found, *(log.placed for log in logs)]


def _new_points(one: Imported, stored: set[Key]) -> list[Placed]:
    """Return a file's points that are not stored yet, each once, and note them as stored."""
    fresh = []
    for point in one.points:
        key = (point.t_ns, point.stage.name, point.request, point.ref, point.a, point.b)
        if key not in stored:
            stored.add(key)
            fresh.append(point)
    return fresh


def _told(one: Imported, fresh: int) -> str:
    left = len(one.points) - fresh
    known = f"; {left:,} of its points {'is' if left == 1 else 'are'} there already" if left else ""
    return (
        f"{plural(one.records, 'record')} of {one.format}, {one.joined} joined, {plural(fresh, 'point')} added{known}"
    )


# Writing -------------------------------------------------------------------------------------------------


def _write(
    store: Store, imported: list[Imported], fresh: dict[str, list[Placed]], clock: Clock | None, outcome: Outcome
) -> None:
    _check_vocabulary(store, fresh.values())
    first = int(store.select("SELECT coalesce(max(process), 0) + 1 FROM process").values[0][0])
    numbers: dict[tuple[str, str], int] = {}
    processes, events = [], []
    for one in imported:
        points = fresh[one.source.digest]
        for name in sorted({point.part for point in points}):
            number = numbers[one.source.digest, name] = first + len(numbers)
            own = [point.t_ns for point in points if point.part == name]
            processes.append(_process(number, one, name, one.parts[name], clock) | {
                "started_ns": min(own), "first_ns": min(own), "last_ns": max(own),
            })  # fmt: skip
        events += [_event(point, numbers[one.source.digest, point.part]) for point in points]
    store.append("process", pa.Table.from_pylist(processes, schema=store.arrow_schema("process")))
    if events:
        store.append("event", pa.Table.from_pylist(events))
    store.remember(_facts(store, imported))
    now_ns = time.time_ns()
    notices = [{"at_ns": now_ns, "subject": name, "message": f"import: {said}"} for name, said in outcome.said]
    if notices:
        store.append("recorder", pa.Table.from_pylist(notices))


def _check_vocabulary(store: Store, fresh: Iterable[list[Placed]]) -> None:
    """Raise if the store is of a release that lacks a point which is to be added: its points are fixed when made."""
    known = {row["stage"] for row in store.rows("SELECT stage::VARCHAR AS stage FROM vocabulary")}
    lacking = {point.stage.name for points in fresh for point in points} - known
    if lacking:
        raise SourceError(f"{min(lacking)} is no point of this store, which an older kvtrace made; record it again")


def _process(number: int, one: Imported, name: str, part: Part, clock: Clock | None) -> dict[str, object]:
    digest = one.source.digest[:16]
    host, domain = clock if clock is not None else (f"import:{digest}", part.clock or "0")
    facts = {
        **part.facts, "imported": one.format, "file": one.source.name, "import_digest": one.source.digest,
    }  # fmt: skip
    # No real process has such a number, so nothing takes it for the parent of another.
    return {
        "process": number, "series": f"import:{digest}:{name}", "host": host, "domain": domain, "pid": -number,
        "parent_pid": 0, "offset_ns": 0, "lost_records": 0, "facts": sorted(facts.items()),
    }  # fmt: skip


def _event(point: Placed, process: int) -> dict[str, object]:
    return {
        "process": process, "stage": point.stage.name, "t_ns": point.t_ns, "request": point.request, "ref": point.ref,
        "a": point.a, "b": point.b, "c": 0, "d": 0,
    }  # fmt: skip


def _facts(store: Store, imported: list[Imported]) -> dict[str, str]:
    """Return what the run says of its imports: per format, which files with how many records."""
    facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
    added = {} if "created_ns" in facts else {"created_ns": str(time.time_ns())}
    for one in imported:
        name = f"imported.{one.format}"
        said = f"{one.source.name}: {plural(one.records, 'record')}"
        added[name] = ", ".join(filter(None, [added.get(name, facts.get(name)), said]))
    return added


def _since_ns(store: Store, fresh: Iterable[list[Placed]]) -> int | None:
    """Return from when on requests are to be worked out again, None for all of them."""
    if store.select("SELECT count(*) FROM event").values[0][0] <= analyze.WHOLE_ANALYSIS_EVENTS:
        return None
    return min((point.t_ns for points in fresh for point in points), default=None)
