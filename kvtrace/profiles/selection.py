"""Which kept profiles an export merges: those of a time, of requests, of a class of a connector's work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvtrace.errors import ExportError
from kvtrace.exporters.source import CHOSEN, NEVER_NS, Choice
from kvtrace.profiler import STAGE_LABEL, STAGES, clean
from kvtrace.profiles import folder, pprof
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrace.store import Store

CLASSES = tuple(sorted({kind for kind in STAGES.values() if kind}))
_WINDOWS_SQL = f"""
SELECT start_ns, greatest(start_ns, coalesce(end_ns, 0), coalesce(first_token_ns, 0)) AS end_ns,
  prefill_engine, decode_engine
FROM request WHERE {CHOSEN} ORDER BY start_ns
"""  # noqa: S608 -- of ours


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to merge: spans of unix ns, by time and apart; engines' labels, all where None; a class, all where empty."""

    spans: tuple[tuple[int, int], ...]
    engines: frozenset[str] | None
    kind: str

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Return whether a sample of these labels is wanted. A router serves every request."""
        if self.kind and STAGES.get(labels.get(STAGE_LABEL, "")) != self.kind:
            return False
        return self.engines is None or labels.get("role") == "router" or labels.get("engine") in self.engines

    def overlaps(self, kept: folder.Kept) -> bool:
        """Return whether a file holds samples of one of the spans, perhaps beside others."""
        return any(begin_ns < max(kept.end_ns, kept.begin_ns + 1) and kept.begin_ns < end_ns
                   for begin_ns, end_ns in self.spans)  # fmt: skip


def wanted(store: Store, choice: Choice, kind: str) -> Wanted:
    """Return what belongs to the requests chosen, or to a time of the run where no request is named."""
    if choice.keys is None:
        begin_ns, end_ns = _extent(store)
        return Wanted(((max(begin_ns, choice.from_ns), min(end_ns, choice.to_ns)),), None, kind)
    rows = store.rows(_WINDOWS_SQL, choice.parameters())
    engines = {clean(row[column]) for row in rows for column in ("prefill_engine", "decode_engine") if row[column]}
    return Wanted(_joined([(row["start_ns"], row["end_ns"] + 1) for row in rows]), frozenset(engines), kind)


def _extent(store: Store) -> tuple[int, int]:
    """Return when the run was recorded, unix ns, as far as it says so: a folder may keep several runs' profiles."""
    rows = store.rows("SELECT name, value FROM run WHERE name IN ('created_ns', 'recorder.published_ns')", {})
    said = {row["name"]: int(row["value"]) for row in rows if row["value"].isdecimal()}
    return said.get("created_ns", 0), said.get("recorder.published_ns", NEVER_NS)


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return spans that are in order, those that touch made one."""
    found: list[tuple[int, int]] = []
    for begin_ns, end_ns in spans:
        if found and begin_ns <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_ns))
        else:
            found.append((begin_ns, end_ns))
    return tuple(found)


def place(store: Store, given: Path | None) -> Path:
    """Return the folder of the run's profiles: the one given, else the recorded one. Raises ExportError without."""
    rows = store.rows("SELECT value FROM run WHERE name = 'profiles.dir'", {})
    found = given or (Path(rows[0]["value"]) if rows else None)
    if found is None:
        raise ExportError("this run kept no profiles; record with --profile-dir DIR, or name a folder of them")
    if not found.is_dir():
        raise ExportError(f"the profiles' folder {found} does not exist; name where it is now with --profile-dir")
    return found


def write(of: Path, chosen: Wanted, out: BinaryIO) -> tuple[int, list[str]]:
    """Write the merged profile; return of how many it is, and what could not be read. Raises ExportError for none."""
    kept = folder.files(of)
    total, failures = folder.merged((one for one in kept if chosen.overlaps(one)), chosen.takes)
    if not total.profiles:
        raise ExportError(
            f"no profile in {of} matches: it keeps {len(kept)}; ask for a longer time, another class, or all of it"
        )
    said = [f"kvtrace: {plural(total.profiles, 'profile')} of wall-clock time"]
    said += [f"class {chosen.kind}"] if chosen.kind else []
    said += [f"engines {', '.join(sorted(chosen.engines))}"] if chosen.engines is not None else []
    out.write(pprof.packed(total.profile("; ".join(said))))
    return total.profiles, failures
