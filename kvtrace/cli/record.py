"""`kvtrace record`: one source of events (a lab, a command, spool folders) into one store."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtrace import profiler
from kvtrace.cli import bounds, profiling, watching
from kvtrace.cli.recording import LATER_NS, Ended, is_private, make_spool, recording
from kvtrace.cli.signals import Stop, ended_in_order, raise_interrupt, stop_signals
from kvtrace.emit import SPOOL_VARIABLE
from kvtrace.errors import LabError, SpoolError, StoreError, UsageError, is_text
from kvtrace.messages import command_line, say, write
from kvtrace.modes import PULL, PUSH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrace.cli.watching import Watch
    from kvtrace.collect import Recorder


@dataclass(frozen=True, slots=True)
class Workload:
    """What a lab is asked to serve; None stands for the lab's own default."""

    requests: int | None
    rate_qps: float | None
    input_len: int | None
    output_len: int | None
    seed: int | None

    def given(self) -> dict[str, Any]:
        """Return what was asked for, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Engines:
    """What a lab is made of; None stands for one engine."""

    mode: str
    prefill: int | None
    decode: int | None
    verify_kv: float = 0.0


@ended_in_order()
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", show_default=False, help="Run and record this command and its children."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="RUN.duckdb", help="The store to write.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite stores of the names given, if they exist.")] = False,
    lab: Annotated[
        str | None, typer.Option(metavar="push|pull", help="Start a lab, drive load through it, record it.")
    ] = None,
    spool: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Follow a folder that processes started elsewhere write to; may be repeated."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="With --spool: take what is there, delete nothing, end.")
    ] = False,
    requests: Annotated[int | None, typer.Option(help="With --lab: requests to send.")] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="QPS", help="With --lab: mean arrivals per second (Poisson).")
    ] = None,
    input_len: Annotated[int | None, typer.Option(help="With --lab: prompt tokens of a request.")] = None,
    output_len: Annotated[int | None, typer.Option(help="With --lab: output tokens of a request.")] = None,
    seed: Annotated[int | None, typer.Option(help="With --lab: seed of prompts and arrivals.")] = None,
    prefill: Annotated[int | None, typer.Option(help="With --lab: prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(help="With --lab: decode engines.")] = None,
    metrics: watching.Metrics = None,
    otlp: watching.Otlp = None,
    otlp_share: watching.OtlpShare = None,
    profile: profiling.Server = None,
    profile_dir: profiling.Folder = None,
    profile_grafana: profiling.Grafana = None,
    grafana_copy: watching.GrafanaCopy = None,
    retain_age: bounds.RetainAge = None,
    retain_size: bounds.RetainSize = None,
    verify_kv: Annotated[
        float,
        typer.Option(metavar="RATE", min=0, max=1, help="Part of the requests whose handed-over blocks are checked."),
    ] = 0.0,
) -> int:
    """Record real hand-offs into a store: of a lab, of any command, or of engines started elsewhere."""
    workload = Workload(requests, rate, input_len, output_len, seed)
    engines = Engines(lab or "", prefill, decode, verify_kv)
    _check_usage(argv := tuple(words or ()), lab, spool or [], workload, engines, once=once)
    if argv and (code := _check_command(argv)):
        return code
    with Stop(listens=bool(spool) and not once) as stop:
        target = _writable(output or _default_output(lab or ("spool" if spool else Path(argv[0]).name)))
        asked = profiling.Asked(profile, profile_dir, profile_grafana)
        watched = watching.Watch(target, metrics, otlp, otlp_share, asked)
        watched.copy_to(grafana_copy, overwrites=force)
        watched.retention = bounds.retention(retain_age, retain_size)
        with watched as watch:
            if lab:
                return _record_lab(target, engines, workload, watch, force=force)
            if argv:
                return _record_command(target, argv, watch, verify_kv, force=force)
            return _record_spools(target, spool or [], watch, stop, force=force, once=once)


# Before anything is started --------------------------------------------------------------------------------


def _default_output(name: str) -> Path:
    """Return the store of a recording that was given none: after what is recorded, and when."""
    return Path(f"kvtrace-{name}-{time.strftime('%Y%m%d-%H%M%S')}.duckdb")


def _check_usage(
    argv: tuple[str, ...], lab: str | None, spools: list[Path], workload: Workload, engines: Engines, *, once: bool
) -> None:
    """Raise UsageError unless there is exactly one source with its own options; SpoolError where a folder is none."""
    sources = (bool(argv), lab is not None, bool(spools))
    if sum(sources) != 1:
        found = "none" if not any(sources) else "more than one"
        raise UsageError(f"record needs exactly one of --lab push|pull, --spool DIR, -- COMMAND; found {found}")
    if lab is not None and lab not in {PUSH, PULL}:
        raise UsageError(f"--lab is push or pull, not {lab!r}")
    strays = [*workload.given(), *(name for name in ("prefill", "decode") if getattr(engines, name) is not None)]
    if strays and lab is None:
        flag = {"rate_qps": "rate"}.get(strays[0], strays[0]).replace("_", "-")
        raise UsageError(f"--{flag} belongs to --lab; a command or a spool folder brings its own load")
    if engines.verify_kv and spools:
        raise UsageError("--verify-kv belongs to --lab and to -- COMMAND; set KVTRACE_VERIFY_KV where engines start")
    if once and not spools:
        raise UsageError("--once belongs to --spool DIR")
    for folder in spools:
        if folder.exists() and not folder.is_dir():
            raise SpoolError(f"--spool {folder} is not a folder; name the one that {SPOOL_VARIABLE} names to engines")
        if once and not folder.exists():
            raise SpoolError(
                f"--spool {folder} does not exist; name the folder that {SPOOL_VARIABLE} names to engines, or a copy"
            )
        if not is_text(str(folder.absolute())):
            raise SpoolError(f"--spool {folder}: its path is no UTF-8, so no store can name it; give it another name")


def _check_command(argv: tuple[str, ...]) -> int:
    """Return 0 where the command can be run, else say so and return a shell's exit code for it."""
    if shutil.which(argv[0]) is not None:
        return 0
    exists = Path(argv[0]).exists() and "/" in argv[0]
    say(f"{argv[0]} is not executable" if exists else f"command not found: {argv[0]}")
    return 126 if exists else 127


def _writable(output: Path) -> Path:
    """Return it. Raises StoreError unless a store can be written there."""
    from kvtrace.store import refuse_bytes

    refuse_bytes(output)
    if output.is_dir():
        raise StoreError(f"{output} is a folder; name a file in it with -o")
    if not output.parent.is_dir():
        raise StoreError(f"{output} cannot be written: the folder {output.parent} does not exist; make it first")
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise StoreError(f"{output} cannot be written: {error.strerror}; name another folder with -o") from error
    return output


def _kept(argv: Sequence[str]) -> str:
    """Return a command as a store keeps it: without secrets, and as text, which the name of a file need not be."""
    from kvtrace.redaction import without_secrets

    return shlex.join(without_secrets(argv)).encode(errors="backslashreplace").decode()


# The three sources -----------------------------------------------------------------------------------------


def _record_command(output: Path, argv: tuple[str, ...], watch: Watch, verify_kv: float, *, force: bool) -> int:
    """Run a command with instrumentation switched on and return its exit code."""
    from kvtrace import child, launch

    ended = Ended()
    with recording(output, [make_spool()], {"command": _kept(argv)}, watch, force=force, ended=ended) as recorder:
        made = launch.prepare(argv, recorder.spools[0], os.environ, verify_kv)
        for note in made.notes:
            say(note)
        ended.code = child.run(made.argv, made.environment)
    return ended.code


def _record_lab(output: Path, engines: Engines, wanted: Workload, watch: Watch, *, force: bool) -> int:
    """Bring a lab up, drive load through it, take it down; return 1 if a request failed, 128 + n after a signal."""
    from kvtrace.lab import metrics, stack, workload
    from kvtrace.report import totals
    from kvtrace.store import discard

    load = workload.Load(**wanted.given())
    sizes = {side: count for side in ("prefill", "decode") if (count := getattr(engines, side)) is not None}
    facts = {"command": _kept(sys.argv), "workload": json.dumps(asdict(load))}
    folder = make_spool()
    recorder: Recorder | None = None
    try:
        with (
            recording(output, [folder], facts, watch, force=force, from_monotonic_ns=LATER_NS) as recorder,
            stop_signals(raise_interrupt) as seen,
        ):
            try:
                with stack.Lab(
                    engines.mode, spool=folder, verify_kv=engines.verify_kv, warm_up_tokens=load.input_len, **sizes
                ) as lab:
                    recorder.facts |= {f"command.{name}": line for name, line in lab.commands.items()}
                    before = metrics.read_once(lab.engines)
                    recorder.from_monotonic_ns = time.monotonic_ns()
                    result = workload.run(lab.url, **asdict(load))
                    recorder.facts |= totals.facts(metrics.since(before, metrics.read(lab.engines)))
            except KeyboardInterrupt:
                say("interrupted: the lab is down, what it served is kept")
                return 128 + (seen[0] if seen else signal.SIGINT)
            write(result.to_text() + "\n")
        _say_totals(output)
        return 0 if len(result.completed) == load.requests else 1
    except LabError:
        if recorder is not None and not recorder.resumed:
            discard(output)  # nothing was served, and the next attempt should find the name free
        raise


def _say_totals(output: Path) -> None:
    """Say whether vLLM's own totals are those of the finished store, or that nobody told them."""
    from kvtrace.report import selection, totals
    from kvtrace.store import Store

    with Store.open(output) as store:
        found = totals.totals(store, selection.run_facts(store))
    if found:
        for line in totals.sentences(found):
            say(line)
        say(f"all of them: {command_line('explain', output, '--reconcile')}")
    else:
        say("no engine's /metrics answered before and after the load, so vLLM's own totals are compared with nothing")


def _record_spools(output: Path, folders: list[Path], watch: Watch, stop: Stop, *, force: bool, once: bool) -> int:
    """Follow folders until interrupted, or take in what is there."""
    for folder in folders:
        is_new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the spool folder {folder} cannot be made: {error.strerror}") from error
        if is_new:
            say(f"{folder} was not there and has been made; start the engines with {SPOOL_VARIABLE} naming it")
    # What others keep a copy of stays theirs; a folder left by a killed recorder is kvtrace's own to clear.
    delete = not once or all(is_private(folder) for folder in folders)
    if watch.profiles_url:
        say(f"engines are profiled where they start with {profiler.VARIABLE}={watch.profiles_url}")
    with recording(output, folders, {}, watch, force=force, delete_consumed=delete) as recorder:
        failure = None
        while not once and not stop.wait(1.0):
            if recorder.failure is not None and str(recorder.failure) != str(failure):
                say(f"{recorder.failure}; trying again")
            failure = recorder.failure
        stop.let_go()  # a second signal ends what is done at the end
    return 0
