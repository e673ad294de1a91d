"""What the recorder knows of processes and spool files, and how both are written beside the events.

The rows live here and in the store; they are written in the same transaction as the events that they account for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvtrace import stages

if TYPE_CHECKING:
    from kvtrace.store import Store
    from kvtrace.wire import SegmentHeader

_OF_THE_RUN = (
    *("vllm", "nixl", "connector", "mode", "model", "device", "tp_size", "untested", "hostname"),
    *("profiles", "profiles.url", "profiles.application"),
)

FileKey = tuple[str, int]
"""A spool file's identity wherever it lies: series and number."""


@dataclass(slots=True)
class ProcessRow:
    """One row of table process."""

    process: int
    series: str
    host: str
    domain: str
    pid: int
    parent_pid: int
    started_ns: int
    offset_ns: int
    first_ns: int | None = None
    last_ns: int | None = None
    facts: dict[str, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)  # by stage code, since the process began
    unfilled: int = 0  # slots never completed, over all its files

    @property
    def lost_records(self) -> int:
        """Records that the process could not keep."""
        return sum(self.dropped.values()) + self.unfilled

    def saw(self, first_ns: int, last_ns: int) -> None:
        """Widen the stretch of time in which the process emitted."""
        self.first_ns = first_ns if self.first_ns is None else min(self.first_ns, first_ns)
        self.last_ns = last_ns if self.last_ns is None else max(self.last_ns, last_ns)


@dataclass(frozen=True, slots=True)
class Position:
    """How far one spool file has been read, as committed."""

    process: int
    path: str
    consumed: int = 0
    holes: tuple[int, ...] = ()
    unfilled: int = 0
    finished: bool = False


_UNKNOWN_STAGE = "stage"

_PROCESS_SCHEMA = pa.schema(
    [
        ("process", pa.int32()),
        ("series", pa.string()),
        ("host", pa.string()),
        ("domain", pa.string()),
        *((name, pa.int64()) for name in ("pid", "parent_pid", "started_ns", "offset_ns", "first_ns", "last_ns")),
        ("lost_records", pa.int64()),
        ("facts", pa.map_(pa.string(), pa.string())),
    ]
)
_POSITION_SCHEMA = pa.schema(
    [
        ("series", pa.string()),
        ("number", pa.int64()),
        ("process", pa.int32()),
        ("path", pa.string()),
        ("consumed", pa.int64()),
        ("holes", pa.list_(pa.int64())),
        ("unfilled", pa.int64()),
        ("finished", pa.bool_()),
    ]
)


class Ledger:
    """All processes and spool files of one store, the changed ones marked until they are written."""

    def __init__(self) -> None:
        self.processes: dict[str, ProcessRow] = {}
        self.positions: dict[FileKey, Position] = {}
        self._offset_of_domain: dict[str, int] = {}
        self._changed_processes: set[str] = set()

    @classmethod
    def load(cls, store: Store) -> Ledger:
        """Return what a store holds, so that a restarted recorder goes on where the last one committed."""
        ledger = cls()
        for row in store.rows("SELECT * FROM process"):
            row["facts"] = dict(row["facts"] or {})
            del row["lost_records"]
            process = ProcessRow(**row)
            ledger.processes[process.series] = process
            ledger._offset_of_domain[process.domain] = process.offset_ns
        for row in store.rows("SELECT * FROM spool_file"):
            key = (row.pop("series"), row.pop("number"))
            row["holes"] = tuple(row["holes"] or ())
            ledger.positions[key] = Position(**row)
        by_number = {process.process: process for process in ledger.processes.values()}
        for row in store.rows("SELECT process, stage, lost_records FROM loss"):
            process = by_number[row["process"]]
            if row["stage"]:
                process.dropped[_code(row["stage"])] = row["lost_records"]
            else:
                process.unfilled = row["lost_records"]
        return ledger

    def admit(self, header: SegmentHeader) -> ProcessRow:
        """Return the row of the process that wrote a file, made if it is new."""
        process = self.processes.get(header.series)
        if process is None:
            own_offset_ns = header.anchor_wall_ns - header.anchor_monotonic_ns
            # One offset for all processes of a clock: their order among each other stays exact.
            offset_ns = self._offset_of_domain.setdefault(header.domain, own_offset_ns)
            process = ProcessRow(
                process=len(self.processes) + 1,
                series=header.series,
                host=header.host_id,
                domain=header.domain,
                pid=header.pid,
                parent_pid=header.parent_pid,
                started_ns=header.started_ns,
                offset_ns=offset_ns,
                facts={"hostname": header.hostname},
            )
            self.processes[header.series] = process
            self._changed_processes.add(header.series)
        return process

    def note(self, process: ProcessRow, facts: dict[str, str], dropped: dict[int, int]) -> None:
        """Take in what a file says of its process beside its events."""
        process.facts = {**process.facts, **facts}
        for code, count in dropped.items():
            process.dropped[code] = max(count, process.dropped.get(code, 0))
        self._changed_processes.add(process.series)

    def write(self, store: Store, positions: dict[FileKey, Position]) -> None:
        """Write changed processes and the given positions; the caller's transaction holds their events too."""
        self._count_unfilled(positions)
        changed = [self.processes[series] for series in sorted(self._changed_processes)]
        if changed:
            numbers = [row.process for row in changed]
            store.execute("DELETE FROM process WHERE process IN (SELECT unnest($numbers))", {"numbers": numbers})
            store.append("process", pa.Table.from_pylist([_process_values(row) for row in changed], _PROCESS_SCHEMA))
            store.execute("DELETE FROM loss WHERE process IN (SELECT unnest($numbers))", {"numbers": numbers})
            losses = [loss for row in changed for loss in _losses(row)]
            if losses:
                store.append("loss", pa.Table.from_pylist(losses))
        if positions:
            names = [f"{series}/{number}" for series, number in positions]
            store.execute(
                "DELETE FROM spool_file WHERE concat(series, '/', number) IN (SELECT unnest($names))", {"names": names}
            )
            values = [
                {"series": series, "number": number, **_position_values(position)}
                for (series, number), position in positions.items()
            ]
            store.append("spool_file", pa.Table.from_pylist(values, _POSITION_SCHEMA))

    def _count_unfilled(self, positions: dict[FileKey, Position]) -> None:
        touched = {key[0] for key, position in positions.items() if position.unfilled}
        for series in touched:
            files = {**self.positions, **positions}.items()
            self.processes[series].unfilled = sum(at.unfilled for key, at in files if key[0] == series)
            self._changed_processes.add(series)

    def committed(self, positions: dict[FileKey, Position]) -> None:
        """Take over what `write` wrote, once its transaction is committed."""
        self.positions.update(positions)
        self._changed_processes.clear()

    def lost_records(self) -> int:
        """Return the records lost so far, over all processes."""
        return sum(process.lost_records for process in self.processes.values())

    def facts(self) -> dict[str, str]:
        """Return what processes say of the run: the different values of a fact, joined by a comma."""
        found = {name: {p.facts[name] for p in self.processes.values() if p.facts.get(name)} for name in _OF_THE_RUN}
        return {name: ", ".join(sorted(values)) for name, values in found.items() if values}


def _process_values(row: ProcessRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _PROCESS_SCHEMA.names}
    values["facts"] = sorted(row.facts.items())
    return values


def _position_values(position: Position) -> dict[str, Any]:
    return {
        "process": position.process,
        "path": position.path,
        "consumed": position.consumed,
        "holes": list(position.holes),
        "unfilled": position.unfilled,
        "finished": position.finished,
    }


def _losses(row: ProcessRow) -> list[dict[str, Any]]:
    losses = [
        {"process": row.process, "stage": _stage(code), "lost_records": count}
        for code, count in sorted(row.dropped.items())
        if count
    ]
    if row.unfilled:
        losses.append({"process": row.process, "stage": "", "lost_records": row.unfilled})
    return losses


def _stage(code: int) -> str:
    stage = stages.BY_CODE.get(code)
    return stage.name if stage is not None else f"{_UNKNOWN_STAGE} {code}"


def _code(stage: str) -> int:
    if stage in stages.BY_NAME:
        return stages.BY_NAME[stage].code
    return int(stage.removeprefix(_UNKNOWN_STAGE))
