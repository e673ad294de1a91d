"""Sample stores for tests of what reads them: requests with round numbers, written as `analyze` writes them."""

from __future__ import annotations

import functools
import pickle
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvtrace import keeping
from kvtrace.schema import ANSWERS
from kvtrace.store import Store
from tests.moulds import cast

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000

# One push request of 100 ms: cause, class, where, what it waited for, ms.
PUSH_PATH: tuple[tuple[str, str, str, str, int], ...] = (
    ("router.decide", "coordination", "router", "", 1),
    ("router.dispatch", "coordination", "router", "", 2),
    ("prefill.hop", "coordination", "prefill", "P's HTTP server", 2),
    ("prefill.frontend", "coordination", "prefill", "", 5),
    ("prefill.queue", "compute.queue", "prefill", "a batch slot", 10),
    ("prefill.forward", "compute.run", "prefill", "", 30),
    ("stage.wait", "coordination", "prefill", "P's step", 3),
    ("writer.wake", "coordination", "prefill", "the sender thread", 7),
    ("post", "transfer", "transfer", "", 4),
    ("wire", "transfer", "transfer", "", 6),
    ("detection", "coordination", "decode", "a poll", 12),
    ("report", "coordination", "decode", "D's scheduler", 3),
    ("decode.first_step", "compute.run", "decode", "", 10),
    ("decode.reply", "coordination", "decode", "", 4),
    ("unattributed", "unattributed", "process", "", 1),
)
# Cause, class, where, start, duration and slack in ms.
PUSH_HIDDEN: tuple[tuple[str, str, str, int, int, int], ...] = (
    ("registration", "coordination", "decode", 5, 8, 40),
    ("sender.poll", "coordination", "prefill", 66, 6, 28),
)


@dataclass
class Sample:
    """Rows of a store under construction, in ms; `write` appends them."""

    facts: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    hidden: list[dict[str, Any]] = field(default_factory=list)
    pace: list[dict[str, Any]] = field(default_factory=list)
    pace_part: list[dict[str, Any]] = field(default_factory=list)
    blame: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        request_id: str,
        path: tuple[tuple[str, str, str, str, int], ...] = PUSH_PATH,
        hidden: tuple[tuple[str, str, str, int, int, int], ...] = PUSH_HIDDEN,
        *,
        start_ms: int = 0,
        **values: Any,
    ) -> None:
        """Add one request whose shares are the sums of its path; an empty path means that no first token came."""
        key = len(self.requests) + 1
        start_ns = START_NS + start_ms * MS
        now_ns = start_ns
        spent = dict.fromkeys(("compute.run", "compute.queue", "coordination", "transfer", "unattributed"), 0)
        for position, (cause, kind, where, waited_for, duration_ms) in enumerate(path):
            end_ns = now_ns + duration_ms * MS
            spent[kind] += duration_ms * MS
            self.segments.append(
                {
                    "request_key": key,
                    "position": position,
                    "class": kind,
                    "cause": cause,
                    "where": where,
                    "waited_for": waited_for,
                    "start_ns": now_ns,
                    "end_ns": end_ns,
                    "crosses_hosts": values.get("crosses_hosts", False),
                }
            )
            now_ns = end_ns
        for cause, kind, where, at_ms, duration_ms, slack_ms in hidden if path else ():
            self.hidden.append(
                {
                    "request_key": key,
                    "cause": cause,
                    "class": kind,
                    "where": where,
                    "start_ns": start_ns + at_ms * MS,
                    "duration_ns": duration_ms * MS,
                    "slack_ns": slack_ms * MS,
                }
            )
        timed = bool(path)
        row: dict[str, Any] = {
            "request_key": key,
            "request_id": request_id,
            "client_request_id": "",
            "attempt": 0,
            "mode": "push",
            "verdict": "complete" if timed else "incomplete",
            "scope": "router",
            "join_method": "remote_request_id" if timed else "none",
            "prefill_engine": "p0" if timed else "",
            "decode_engine": "d0" if timed else "",
            "prompt_tokens": 600,
            "output_tokens": 32 if timed else None,
            "start_ns": start_ns,
            "first_token_ns": now_ns if timed else None,
            "end_ns": now_ns + 200 * MS if timed else None,
            "ttft_ns": now_ns - start_ns if timed else None,
            "compute_ns": spent["compute.run"] + spent["compute.queue"] if timed else None,
            "compute_run_ns": spent["compute.run"] if timed else None,
            "compute_queue_ns": spent["compute.queue"] if timed else None,
            "coordination_ns": spent["coordination"] if timed else None,
            "transfer_ns": spent["transfer"] if timed else None,
            "transfer_low_ns": max(0, spent["transfer"] - 4 * MS) if timed else None,
            "transfer_high_ns": spent["transfer"] + min(8 * MS, _spent_ns(path, "detection") or 0) if timed else None,
            "unattributed_ns": spent["unattributed"] if timed else None,
            "registration_late_ns": 0,
            "moved_bytes": 1_300_000 if timed else None,
            "descriptors": 20 if timed else None,
            "transfers": 1 if timed else None,
            "crosses_hosts": False,
            "note": None,
            **{f"{cause}_ns": _spent_ns(path, cause) for cause in ("post", "wire", "detection")},
        }
        self.requests.append(row | values)

    def add_pace(
        self, request_id: str, parts: tuple[tuple[str, str, int], ...], itl_ms: tuple[int, ...], **blame_ms: int
    ) -> None:
        """Add the pace of the tokens after the first to a request: (cause, class, ms) parts, ms between tokens."""
        key = next(row["request_key"] for row in self.requests if row["request_id"] == request_id)
        whole_ms = sum(ms for _, _, ms in parts)
        extension_ms = sum(ms for cause, _, ms in parts if cause == "step.connector")
        self.pace.append({
            "request_key": key, "start_ns": START_NS, "end_ns": START_NS + whole_ms * MS, "tokens": len(itl_ms),
            "steps": len(itl_ms), "tpot_ns": whole_ms * MS // len(itl_ms),
            "itl_p50_ns": sorted(itl_ms)[len(itl_ms) // 2] * MS, "itl_max_ns": max(itl_ms) * MS,
            "extension_ns": extension_ms * MS, "occupancy_ns": 2 * extension_ms * MS,
        })  # fmt: skip
        (request,) = (row for row in self.requests if row["request_key"] == key)
        request |= {"tpot_ns": self.pace[-1]["tpot_ns"], "decode_tokens": len(itl_ms)}
        for cause, kind, ms in parts:
            self.pace_part.append({"request_key": key, "cause": cause, "class": kind, "duration_ns": ms * MS})
        for name, ms in blame_ms.items():
            self.blame.append({"request_key": key, "blamed_request_id": name, "extension_ns": ms * MS})

    def write(self, path: Path) -> Path:
        """Write a new store at `path` and return the path."""
        return cast(path, ("sample", pickle.dumps(vars(self))), self._make)

    def _make(self, path: Path) -> None:
        path.write_bytes(empty_store())
        with Store.open(path, "write") as store:
            store.remember(self.facts)
            for table in ANSWERS:
                rows = getattr(self, f"{table}s" if table in ("request", "segment") else table)
                if rows:
                    store.append(table, pa.Table.from_pylist(rows, schema=store.arrow_schema(table)))
            keeping.refresh(store)


def _spent_ns(path: tuple[tuple[str, str, str, str, int], ...], cause: str) -> int | None:
    """Return how long a cause took on a path, None if it does not lie there."""
    found = [ms * MS for name, _, _, _, ms in path if name == cause]
    return sum(found) if found else None


@functools.cache
def empty_store() -> bytes:
    """Return the bytes of a store without rows; making one takes long compared with filling it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.duckdb"
        Store.open(path, "write").close()
        return path.read_bytes()


def scaled(factor: int) -> tuple[tuple[str, str, str, str, int], ...]:
    """Return the push path with every time multiplied: 100 ms times `factor`."""
    return tuple((cause, kind, where, waited_for, factor * ms) for cause, kind, where, waited_for, ms in PUSH_PATH)
