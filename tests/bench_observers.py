"""What tracing itself takes of a request's time, timed inside the processes: own work, by process and by kind.

    python -m tests.bench_observers [--mode push pull] [--minutes 1] [--kinds] [--figures FILE]

`bench_switched` compares requests with tracing and without, whose times scatter by more than tracing takes. Here each
watched call, message and event is timed where it happens (`observer_site`), so the figure is tight; it leaves out what
tracing does to others indirectly (caches, memory). Requests are asked one after another, of one output token and of
many by turns: the first kind's own work is what lies before the first token (and its tidying up behind it), the
difference is that of the tokens that follow. All processes are added up, also where they work at the same time, and
the timing counts as tracing, so both are bounds from above of what a request waits for tracing's own work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace.lab import stack
from tests import figures
from tests.bench_serving import ask
from tests.figure_rows import Row, plain, shortened
from tests.observer_site.sitecustomize import ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterator

SITE = Path(__file__).parent / "observer_site"
VARIABLE = "KVTRACE_BENCH_OBSERVERS"
MANY_TOKENS = 33
WARM_UP = 8
SETTLE_S = 0.05
"""Longer than engines take to tidy up behind a request."""

Key = tuple[str, str]
"""Process and kind of work."""
Spent = dict[Key, tuple[int, int]]
"""Calls and ns so far."""


def spent(folder: Path, names: dict[int, str]) -> Spent:
    """Return calls and time so far by process and kind, of the processes that `names` gives names."""
    found: Spent = {}
    for path in folder.glob("*.names"):
        kinds = path.read_text(encoding="utf-8").splitlines()
        entries = ENTRY.iter_unpack(path.with_suffix(".times").read_bytes())
        name = names.get(int(path.stem))
        for kind, (calls, spent_ns) in zip(kinds, entries, strict=False):
            if name is not None:
                before = found.get((name, kind), (0, 0))
                found[name, kind] = (before[0] + calls, before[1] + spent_ns)
    return found


def processes(lab: stack.Lab) -> dict[int, str]:
    """Return what each process of a lab is, by pid: whose group it is in and what it calls itself."""
    groups = {engine.pid: "P" if engine.role == "prefill" else "D" for engine in lab.engines}
    found = {}
    for pid in lab.pids():
        side = groups.get(os.getpgid(pid), "router")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        part = {"VLLM::EngineCor": "core", "VLLM::Worker": "worker"}.get(name, "API server")
        found[pid] = side if side == "router" else f"{side}'s {part}"
    return found


def measure(mode: str, seconds: float) -> dict[str, Any]:
    """Return what tracing takes of the time to the first token and of the further ones, and where."""
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-") as name:
        folder = Path(name)
        variables = {"PYTHONPATH": f"{SITE}{os.pathsep}{figures.ROOT}", VARIABLE: name}
        environment = dict.fromkeys(("prefill", "decode", "router"), variables)
        with stack.Lab(mode, quiet=True, spool=folder / "spool", environment=environment) as lab:
            ask(lab, WARM_UP, 900)
            names = processes(lab)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s or len(asked) < 2:
                seed = len(asked)
                asked.append((serve(lab, folder, names, seed, 1), serve(lab, folder, names, seed, MANY_TOKENS)))
    if not all(sum(calls for calls, _ in one["spent"].values()) for pair in asked for one in pair):
        raise SystemExit("no own work was timed in a request: this bench does not work with these connectors")
    return {"mode": mode, "requests": len(asked), **_first(asked), **_further(asked)}


def serve(lab: stack.Lab, folder: Path, names: dict[int, str], seed: int, output_len: int) -> dict[str, Any]:
    """Serve one request; return its TTFT and TPOT in ns, and what was spent on it by process and kind."""
    time.sleep(SETTLE_S)
    before = spent(folder, names)
    (record,) = ask(lab, 1, seed, output_len).completed
    time.sleep(SETTLE_S)
    after = spent(folder, names)
    none = (0, 0)
    more = {
        key: (calls - before.get(key, none)[0], ns - before.get(key, none)[1]) for key, (calls, ns) in after.items()
    }
    return {"ttft_ns": record.ttft_ns, "tpot_ns": record.tpot_ns, "spent": more}


def _first(asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    short = [pair[0] for pair in asked]
    total = [sum(ns for _, ns in one["spent"].values()) for one in short]
    return {
        "ttft_ms": statistics.median(one["ttft_ns"] for one in short) / 1e6,
        "first_us": statistics.median(total) / 1e3,
        "first_share": statistics.median(ns / one["ttft_ns"] for ns, one in zip(total, short, strict=True)),
        "first_by_process_us": _means(short),
    }


def _further(asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    tokens = MANY_TOKENS - 1
    more = [
        (sum(ns for _, ns in long["spent"].values()) - sum(ns for _, ns in short["spent"].values())) / tokens
        for short, long in asked
    ]
    tpot = [pair[1]["tpot_ns"] for pair in asked]
    return {
        "tpot_ms": statistics.median(tpot) / 1e6,
        "token_us": statistics.median(more) / 1e3,
        "token_share": statistics.median(ns / each for ns, each in zip(more, tpot, strict=True)),
        "many_by_process_us": _means([pair[1] for pair in asked]),
    }


def _means(requests: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return calls and us a request, in the mean, by process and kind; the dearest first."""
    calls: Counter[Key] = Counter()
    total_ns: Counter[Key] = Counter()
    for one in requests:
        for key, (count, ns) in one["spent"].items():
            calls[key] += count
            total_ns[key] += ns
    found: dict[str, dict[str, list[float]]] = {}
    for (process, kind), ns in total_ns.most_common():
        found.setdefault(process, {})[kind] = [calls[process, kind] / len(requests), ns / len(requests) / 1e3]
    return found


def _lines(found: dict[str, Any], *, kinds: bool) -> Iterator[str]:
    yield (
        f"{found['mode']}, {found['requests']} requests: own work {found['first_us']:.0f} us a request to its first "
        f"token, {found['first_share']:.2%} of a TTFT of {found['ttft_ms']:.1f} ms; {found['token_us']:.0f} us for "
        f"each further token, {found['token_share']:.2%} of a TPOT of {found['tpot_ms']:.2f} ms (medians)"
    )
    for what, name in (("a request of one token", "first"), (f"a request of {MANY_TOKENS} tokens", "many")):
        yield f"  {what}, in the mean:"
        for process, by_kind in found[f"{name}_by_process_us"].items():
            yield f"    {process:<14}{sum(us for _, us in by_kind.values()):7.0f} us"
            if kinds:
                for kind, (calls, us) in by_kind.items():
                    yield f"      {kind:<56}{calls:7.1f} calls {us:8.1f} us"


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    """Return the same with us a request by process, as it is kept: the kinds are for whoever looks for what to mend."""
    return {
        name: {process: sum(us for _, us in kinds.values()) for process, kinds in value.items()}
        if name.endswith("by_process_us") else value
        for name, value in found.items()
    }  # fmt: skip


def _of(mode: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["mode"]: one for one in found}[mode]


def _number(mode: str, name: str, found: list[dict[str, Any]]) -> float:
    return float(_of(mode, found)[name])


def _share(mode: str, share: str, what: str, whole: str, found: list[dict[str, Any]]) -> str:
    one = _of(mode, found)
    return f", {plain(shortened(one[share] * 100))} % of a {what} of {plain(shortened(one[whole]))} ms"


ROWS = {
    f"{mode}.{name}": Row(
        f"tracing's own work, timed in all processes, {mode}, {what}", unit,
        partial(_number, mode, figure), more=partial(_share, mode, share, *whole),
    )
    for mode in ("push", "pull")
    for name, what, unit, figure, share, whole in (
        ("first", "to the first token", " us a request", "first_us", "first_share", ("TTFT", "ttft_ms")),
        ("token", "each further token", " us", "token_us", "token_share", ("TPOT", "tpot_ms")),
    )
}  # fmt: skip


def main() -> None:
    """Measure the asked modes and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("push", "pull"), default=["push", "pull"])
    parser.add_argument("--minutes", type=float, default=1.0, help="time that a mode is measured")
    parser.add_argument("--kinds", action="store_true", help="also print every kind of call")
    parser.add_argument("--json", action="store_true", help="print JSON")
    figures.add_option(parser)
    arguments = parser.parse_args()
    run = figures.Run(arguments.figures)
    found = [measure(mode, arguments.minutes * 60) for mode in arguments.mode]
    lines = (
        [json.dumps(found)]
        if arguments.json
        else [line for one in found for line in _lines(one, kinds=arguments.kinds)]
    )
    sys.stdout.write("\n".join(lines) + "\n")
    run.keep("observers", [_kept(one) for one in found])


if __name__ == "__main__":
    main()
