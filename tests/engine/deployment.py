"""A lab under test: requests sent one at a time under given delays, and what kvtrace says of each."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtrace import analyze
from kvtrace.collect import Recorder
from kvtrace.lab import workload
from kvtrace.lab.stack import Lab
from kvtrace.store import Store, working_path
from tests.engine.client import Client
from tests.engine.faults import Faults, Settings

OUTPUT_TOKENS = 2
PAUSE_S = 0.03
"""Between two requests, so that P has freed the blocks of the first and no step of it runs any more."""
WARM_UP = 5
SMALL_CACHE = ("--num-gpu-blocks-override", "256")
"""KV for 32,768 tokens: an engine's start is quicker by the seconds that it takes to touch a whole GiB."""
SETTLED_NS = 2_000_000_000
"""A request this old gets no more events."""


@dataclass(frozen=True)
class Answer:
    """What kvtrace says of one request; times in ms."""

    name: str
    row: Mapping[str, Any]
    causes_ms: Mapping[str, float]
    hidden_ms: Mapping[str, float]
    slack_ms: Mapping[str, float]
    segments: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def kind(self) -> str:
        """Return what kind of request it was: its name without the number."""
        return self.name.rpartition(":")[0]

    def share_ms(self, column: str) -> float:
        """Return one of the request's durations."""
        return float(self.row[f"{column}_ns"]) / 1e6


class Deployment:
    """One lab with its delays. `send` sends one request; `answers` records everything sent so far.

    `environment` maps a role to more variables for its processes; further options are those of the lab.
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        warm_up: int = WARM_UP,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mode = mode
        self.faults = Faults(folder / "faults")
        self.spool = folder / "spool"
        self._stores = folder
        self._recorded = 0
        self._since_ns: int | None = None
        self._warm_up = warm_up
        self._numbers: dict[str, int] = defaultdict(int)
        self.held_ms: dict[str, list[float]] = defaultdict(list)
        """By kind, how long its requests that met all their delays were held up, all delays together."""
        extra = environment or {}
        variables = {role: {**own, **extra.get(role, {})} for role, own in self.faults.environment.items()}
        options["arguments"] = (*SMALL_CACHE, *options.get("arguments", ()))
        self.lab = Lab(mode, spool=self.spool, environment=variables, quiet=True, **options)

    def __enter__(self) -> Self:
        self.lab.start()
        try:
            self._client = Client(self.lab.url)
            for _ in range(self._warm_up):
                self.send("warm-up")
        except BaseException:
            self.lab.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.lab.stop()

    def send(
        self,
        kind: str,
        settings: Settings | None = None,
        prompt_tokens: int = 600,
        meanwhile: Callable[[], None] | None = None,
        prompt: str | None = None,
    ) -> float:
        """Send one request under the given delays and return its TTFT as the client sees it, ms."""
        name = f"{kind}:{self._numbers[kind]}"
        self._numbers[kind] += 1
        beside = threading.Thread(target=meanwhile or (lambda: None))
        with self.faults.on(settings or {}) as held_ms:
            beside.start()
            ttft_ms = self._client.ttft_ms(
                name,
                model=self.lab.model,
                prompt=prompt or workload.prompt(1, 0, prompt_tokens),
                max_tokens=OUTPUT_TOKENS,
                temperature=0,
                ignore_eos=True,
            )
        beside.join()
        if len(held_ms) == len(settings or {}):
            self.held_ms[kind].append(sum(held_ms))
        time.sleep(PAUSE_S)
        return ttft_ms

    def record(self) -> Path:
        """Record everything that was emitted so far and return the store; answers found before are not found again."""
        before, self._recorded = self._store(), self._recorded + 1
        since_ns, self._since_ns = self._since_ns, time.time_ns() - SETTLED_NS
        if before.exists():
            shutil.copyfile(before, working_path(self._store()))  # a recording that goes on
        with Recorder(
            self._store(), [self.spool], {"mode": self.mode}, delete_consumed=False,
            analysis=lambda store, _since_ns, _meanwhile: analyze.worked_out(store, since_ns),
        ) as recorder:  # fmt: skip
            recorder.run_once()
        return self._store()

    def _store(self) -> Path:
        return self._stores / f"{self.mode}-{self._recorded}.duckdb"

    def answers(self) -> dict[str, list[Answer]]:
        """Record everything that was emitted so far and return the answers by kind, warm-up left out."""
        with Store.open(self.record(), "read") as store:
            found = list(_read(store))
        by_kind: dict[str, list[Answer]] = defaultdict(list)
        for answer in found:
            if answer.name and not answer.name.startswith("warm-up"):
                by_kind[answer.kind].append(answer)
        return by_kind

    def pid(self, process: str) -> int:
        """Return the process id of the router, or of a side's API server, engine core or worker (`decode.api`, ...)."""
        if process == "router":
            assert self.lab.router is not None
            return self.lab.router.pid
        role, _, part = process.partition(".")
        (engine,) = (engine for engine in self.lab.engines if engine.role.value == role)
        if part == "api":
            return engine.pid
        core = next(child for child in _children(engine.pid) if "EngineCore" in _title(child))
        return core if part == "core" else next(child for child in _children(core) if "Worker" in _title(child))


def _read(store: Store) -> Iterable[Answer]:
    segments, hidden = defaultdict(list), defaultdict(list)
    for row in store.rows(
        "SELECT request_key, class, cause, waited_for, start_ns, end_ns FROM segment ORDER BY 1, start_ns"
    ):
        segments[row["request_key"]].append(row)
    for row in store.rows("SELECT request_key, cause, duration_ns, slack_ns FROM hidden"):
        hidden[row["request_key"]].append(row)
    for row in store.rows("SELECT * FROM request ORDER BY start_ns"):
        key = row["request_key"]
        causes_ms: dict[str, float] = defaultdict(float)
        for segment in segments[key]:
            causes_ms[segment["cause"]] += (segment["end_ns"] - segment["start_ns"]) / 1e6
        yield Answer(
            name=row["client_request_id"] or "",
            row=row,
            causes_ms=causes_ms,
            hidden_ms={one["cause"]: one["duration_ns"] / 1e6 for one in hidden[key]},
            slack_ms={one["cause"]: one["slack_ns"] / 1e6 for one in hidden[key]},
            segments=tuple(segments[key]),
        )


def stop_for(pid: int, duration_s: float, after_s: float) -> None:
    """Stop the process after some time, and let it go on after some more."""
    time.sleep(after_s)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(duration_s)
    os.kill(pid, signal.SIGCONT)


def prolong_stop(pid: int, duration_s: float, timeout_s: float = 60.0) -> None:
    """Wait until the process has stopped itself, and let it go on after some more time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_stopped(pid) and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    time.sleep(duration_s)
    os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _children(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
