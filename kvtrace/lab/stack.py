"""The whole lab: prefill engines, decode engines and a router, brought up together and taken down whatever happens."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from kvtrace.emit import SPOOL_VARIABLE
from kvtrace.errors import LabError, UsageError
from kvtrace.lab import logs, model, pollers, ports, takedown, warm_up
from kvtrace.lab.engine import CONNECTORS, Engine, EngineOptions, Role, describe, require
from kvtrace.lab.guard import Guard
from kvtrace.lab.program import Program, Server
from kvtrace.lab.progress import Progress
from kvtrace.launch import VERIFY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

START_TIMEOUT_S = 300.0
_POLL_S = 0.1
_SOCKET_PATH_MAX = 50  # vLLM's Unix sockets lie below the temporary folder and may have 107 letters in all


@dataclass(frozen=True, slots=True)
class Router(Server):
    """The lab's router: where clients reach it, and the program that it runs as."""

    port: int
    program: Program


class Lab:
    """Engines and a router on loopback ports; a context manager that leaves nothing behind.

    `environment` maps a role (prefill, decode, router) or a name (prefill-0) to variables for those programs;
    a PYTHONPATH among them goes in front of the inherited one. Further options are those of `EngineOptions`;
    `overrides` gives the engines of one role (prefill, decode) others. Of `verify_kv` (0 to 1) of the requests the
    handed-over blocks are checked. With `warm_up_tokens`, engines serve some requests before the lab is up, one with
    a prompt of that length.
    """

    def __init__(
        self,
        mode: str,
        *,
        prefill: int = 1,
        decode: int = 1,
        spool: Path | None = None,
        router: bool = True,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        quiet: bool = False,
        verify_kv: float = 0.0,
        warm_up_tokens: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        if mode not in CONNECTORS:
            raise UsageError(f"unknown mode {mode!r}; a lab hands KV over by {' or '.join(CONNECTORS)}")
        if prefill < 1 or decode < 1:
            raise UsageError("a lab needs at least one prefill and one decode engine")
        self.mode = mode
        self.options = EngineOptions(mode, **options)
        self.engines: list[Engine] = []
        self.router: Router | None = None
        self.spool: Path | None = spool
        self.model = model.NAME
        self._counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self._with_router = router
        self._environment = environment or {}
        self._overrides = overrides or {}
        self._verify_kv = verify_kv
        self._warm_up_tokens = warm_up_tokens
        self._start_timeout_s = start_timeout_s
        self._progress = Progress(quiet=quiet)
        self._marker = secrets.token_hex(8)
        self._members = takedown.Members(self._marker)
        self._guard: Guard | None = None
        self.folder = Path()
        self.model_dir = Path()

    # Coming up ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Bring everything up; on failure take everything down and raise LabError."""
        self.start()
        return self

    def start(self) -> None:
        """Bring everything up; on failure take everything down and raise LabError."""
        require()
        self.model_dir = model.build()
        self._make_folder()
        try:
            self._guard = Guard(self._marker, self.folder)
            with self._progress:
                self._start_engines()
                if self._warm_up_tokens:
                    self._progress.show("engines", "serve their first requests, which are not recorded")
                    warm_up.serve(self.engines, self._warm_up_tokens)
                pollers.calm(self.pids())
                if self._with_router:
                    self._start_router()
        except BaseException as error:
            self.stop(keep_logs=isinstance(error, Exception))
            raise

    def _make_folder(self) -> None:
        parent = tempfile.gettempdir()
        if len(parent) > _SOCKET_PATH_MAX:
            parent = "/tmp"  # noqa: S108 -- a private folder is made in it
        self.folder = Path(tempfile.mkdtemp(prefix="kvtrace-lab-", dir=parent))
        (self.folder / "tmp").mkdir()
        if self.options.instrumented:
            self.spool = (self.spool or self.folder / "spool").absolute()
            self.spool.mkdir(parents=True, exist_ok=True)

    def _start_engines(self) -> None:
        for role, count in self._counts.items():
            options = replace(self.options, **self._overrides.get(role.value, {}))
            for number in range(count):
                extra = self._extra(role.value, f"{role.value}-{number}")
                self.engines.append(describe(role, number, options, self.folder, self.model_dir, extra))
        for engine in self.engines:
            self._launch(engine.program)
        self._await_engines(self.engines)

    def _await_engines(self, waiting: list[Engine]) -> None:
        """Return once all answer; raise LabError as soon as one has ended, or after the time allowed."""
        deadline_s = time.monotonic() + self._start_timeout_s
        with httpx.Client(trust_env=False, timeout=1.0) as client:
            while waiting:
                waiting = [engine for engine in waiting if not self._is_up(client, engine)]
                self._check([engine.program for engine in waiting], deadline_s)

    def _is_up(self, client: httpx.Client, engine: Engine) -> bool:
        """Return whether the engine answers its health check, and show how far it is."""
        with suppress(httpx.HTTPError):
            if client.get(f"{engine.url}/health").is_success:
                self._progress.show(engine.name, f"ready at {engine.url}")
                return True
        with suppress(OSError):
            log = engine.log.read_text(encoding="utf-8", errors="replace")
            self._progress.show(engine.name, logs.milestone(log))
        return False

    def _check(self, programs: list[Program], deadline_s: float) -> None:
        """Raise LabError where one of the programs has ended or its time is up; else wait a moment."""
        for program in programs:
            code = program.exit_code()
            if code is not None:
                raise self._failure(program, f"ended with exit code {code} while starting")
        if programs and time.monotonic() > deadline_s:
            raise self._failure(programs[0], f"did not answer within {self._start_timeout_s:.0f} s")
        if programs:
            time.sleep(_POLL_S)

    def _failure(self, program: Program, what: str) -> LabError:
        """Show the end of the program's log and return the error that says what to do."""
        tail = program.last_lines()
        self._progress.note(f"--- last lines of {program.log}\n{tail}\n---")
        remedy = logs.remedy(tail) or "its log, shown above, says why"
        return LabError(f"{program.name} {what}; {remedy} ({program.log} is kept)")

    def _start_router(self) -> None:
        port_file = self.folder / "router.port"
        port = ports.take()
        sides = {Role.PREFILL: "--prefill", Role.DECODE: "--decode"}
        command = (
            *(sys.executable, "-m", "kvtrace", "router", "--mode", self.mode),
            *(part for engine in self.engines for part in (sides[engine.role], engine.route)),
            *("--host", ports.HOST, "--port", str(port), "--port-file", str(port_file)),
        )
        program = Program("router", command, self._extra("router"), self.folder / "router.log")
        self.router = Router(port, program)
        self._launch(program)
        self._await_router(port_file)

    def _await_router(self, port_file: Path) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while not port_file.exists():
            self._progress.show("router", "starts")
            self._check([self._router_program()], deadline_s)
        self._progress.show("router", f"ready at {self.url}")

    def _extra(self, *names: str) -> dict[str, str]:
        """Return the variables on top of the recipe for the programs of these names, later names winning."""
        extra = {SPOOL_VARIABLE: str(self.spool)} if self.options.instrumented else {}
        if self._verify_kv:
            extra[VERIFY_VARIABLE] = str(self._verify_kv)
        for name in names:
            extra |= self._environment.get(name, {})
        return extra

    def _launch(self, program: Program) -> None:
        program.start({takedown.MARKER: self._marker, "TMPDIR": str(self.folder / "tmp")})
        self._members.add(program.pid)
        if self._guard is not None:
            self._guard.watch(program.pid)

    # While up -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Return the router's address."""
        if self.router is None:
            raise LabError("this lab has no router; make it with router=True, or ask an engine's url")
        return self.router.url

    @property
    def commands(self) -> dict[str, str]:
        """Return each program's exact command by its name, as it can be pasted into a shell."""
        return {program.name: program.shell_line for program in self._programs()}

    def pids(self) -> list[int]:
        """Return the process ids of everything of this lab that runs."""
        return self._members.alive()

    def restart(self, name: str) -> None:
        """Start a program of this lab that has ended once more, on its old ports, and wait until it answers."""
        program = next((program for program in self._programs() if program.name == name), None)
        if program is None:
            raise LabError(f"this lab has no program {name!r}; it has {', '.join(self.commands)}")
        one = takedown.Members(marker="")
        one.add(program.pid)
        takedown.end(one, [program.pid] if program.exit_code() is None else [], grace_s=0.0)
        if name == "router":
            (self.folder / "router.port").unlink(missing_ok=True)
        with self._progress:
            self._launch(program)
            if name == "router":
                self._await_router(self.folder / "router.port")
            else:
                self._await_engines([engine for engine in self.engines if engine.name == name])
                pollers.calm(self.pids())

    def failed(self) -> list[str]:
        """Return the names of programs that have ended by themselves."""
        return [program.name for program in self._programs() if program.exit_code() is not None]

    def _programs(self) -> list[Program]:
        programs = [engine.program for engine in self.engines]
        return [*programs, self.router.program] if self.router else programs

    def _router_program(self) -> Program:
        if self.router is None:
            raise LabError("this lab has no router")
        return self.router.program

    # Going down -----------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take everything down; the logs stay where an error came out of the block."""
        self.stop(keep_logs=isinstance(error, Exception))

    def stop(self, *, keep_logs: bool = False) -> None:
        """Take everything down and remove the lab's folder, or all of it but the logs.

        Where this is interrupted in its turn, the guard finishes the work.
        """
        running = [program for program in self._programs() if program.process is not None]
        leaders = [program.pid for program in running if program.exit_code() is None]
        takedown.end(self._members, leaders, takedown.GRACE_S)
        for program in running:
            if program.process is not None:
                program.process.wait()
        takedown.await_reaped(self._members)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        self._remove_folder(keep_logs=keep_logs)

    def _remove_folder(self, *, keep_logs: bool) -> None:
        for engine in self.engines:
            ports.give_back(engine.port)
            ports.give_back(engine.side_channel_port, engine.tensor_parallel_size)
        if self.router is not None:
            ports.give_back(self.router.port)
        if keep_logs and any(self.folder.glob("*.log")):
            for name in ("tmp", "spool"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self._progress.note(f"the lab's logs are kept in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
