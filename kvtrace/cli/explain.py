"""`kvtrace explain`: where one request's time to first token went, a whole run's, or what differs between two runs."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtrace.analyze import points
from kvtrace.errors import RequestError, UsageError
from kvtrace.messages import command_line
from kvtrace.profiles import links
from kvtrace.reconcile import Line
from kvtrace.reconcile import reconcile as reconciled
from kvtrace.report import comparison, population, selection, totals
from kvtrace.store import Store
from kvtrace.store.amounts import count_impossible
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JSON_SCHEMA = 1
# More than this many pictures help nobody; JSON has no such limit.
DRAWN_REQUESTS = 50


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN.duckdb", help="The store that `kvtrace record` wrote.")],
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST]", help="A request id, a client's id, or the beginning of one.", show_default=False
        ),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option("--slowest", metavar="N", min=1, help="Explain the N requests with the longest TTFT.")
    ] = None,
    reconcile: Annotated[
        bool,
        typer.Option(
            "--reconcile",
            help="Also say what vLLM, NIXL, llm-d and Dynamo would report for it; without REQUEST, vLLM's own totals.",
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="OTHER.duckdb", help="Say what differs from this other recording."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: everything, in ns, nothing shortened.")] = False,
) -> int:
    """Explain where the time to first token went.

    For one request: what it waited for, its critical path drawn lane by lane, the work hidden beside it.
    Without a request: percentiles of all of them, the shares of each class, top causes, the slowest by id.
    With --against: what differs between two recordings, how surely, and what else differs and may be why.
    That no verdict can be given is an answer too; the exit code is 1 where nothing of the two can be compared.
    """
    if against is not None:
        if request is not None or slowest is not None or reconcile:
            raise UsageError(
                "--against compares all requests of two recordings: it goes with no REQUEST, --slowest or --reconcile"
            )
        return _compare(run, against, as_json=as_json)
    if request is not None and slowest is not None:
        raise UsageError("a REQUEST and --slowest exclude each other: name one request, or ask for the slowest")
    with Store.open(run) as store:
        if reconcile and request is None and slowest is None and not totals.totals(store, selection.run_facts(store)):
            raise RequestError(
                "--reconcile is about single requests (name a REQUEST, or ask for the --slowest), or about vLLM's own "
                "totals, which only `record --lab` keeps: this run holds none"
            )
        keys = _selected(store, request, slowest)
        if as_json:
            _write_json(store, selection.all_keys(store) if keys is None else keys, reconcile=reconcile)
        _refuse_empty(store, run)
        if not as_json:
            _print(store, run, keys, reconcile=reconcile)
    return 0


def _compare(run: Path, against: Path, *, as_json: bool) -> int:
    """Say what differs between two recordings; return 1 where they cannot be compared."""
    with Store.open(run) as store, _other(store, run, against) as other:
        document = comparison.compare(store, other)
        facts = selection.run_facts(store), selection.run_facts(other)
    paths = str(run), str(against)
    from kvtrace.report import comparison_page, contrasts, style

    if as_json:
        found = {"schema": JSON_SCHEMA, **contrasts.to_json(document, facts, paths)}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        comparison_page.print_comparison(document, paths, style.open_console())
    return 0 if document["groups"] else 1


def _other(store: Store, run: Path, against: Path) -> AbstractContextManager[Store]:
    """Open the other store; the same one stays opened once, since DuckDB would not be confined a second time."""
    try:
        is_same = run.samefile(against)
    except OSError:
        is_same = False  # opening it says what is the matter
    return nullcontext(store) if is_same else Store.open(against)


def _selected(store: Store, request: str | None, slowest: int | None) -> list[int] | None:
    """Return the keys of the requests asked for, None for the population."""
    if request is not None:
        return selection.find_keys(store, request)
    return None if slowest is None else selection.slowest_keys(store, slowest)


def _refuse_empty(store: Store, run: Path) -> None:
    counted = store.rows(
        "SELECT (SELECT count(*) FROM request) AS requests, (SELECT count(*) FROM event) AS events, "
        "(SELECT count(*) FROM process) AS processes",
        {},
    )[0]
    if not counted["requests"]:
        if count := count_impossible(store):
            told = f"{run} holds no request, and amounts that nothing has in {plural(count, 'event')}"
            raise RequestError(f"{told}: `{command_line('upgrade', run)}` leaves these out and works out the others")
        raise RequestError(
            f"{run} holds no request, only {plural(counted['events'], 'event')} of "
            f"{plural(counted['processes'], 'process', 'processes')}: "
            "was anything sent, and were the engines started with kvtrace switched on?"
        )


def _write_json(store: Store, keys: Sequence[int], *, reconcile: bool) -> None:
    """Write the document piece by piece, since a long run's requests need not fit into memory at once."""
    facts = selection.run_facts(store)
    place = links.Place.of(facts)
    out = sys.stdout
    out.write(f'{{"schema": {JSON_SCHEMA}, "run": {json.dumps(facts)}, "requests": [')
    for position, explained in enumerate(selection.explained(store, keys)):
        out.write(",\n" if position else "\n")
        document = explained.to_json()
        if reconcile:
            document["reconcile"] = [asdict(line) for line in _reconciled(store, explained)]
        if place is not None:
            document["profiles"] = [_profiled(place, part) for part in links.windows(explained.request)]
        out.write(json.dumps(document))
    found = totals.totals(store, facts) if reconcile else []
    told = f', "totals": {json.dumps([asdict(one) for one in found])}' if found else ""
    out.write(f'\n], "summary": {json.dumps(population.summary(store, facts))}{told}}}\n')


def _profiled(place: links.Place, part: links.Window) -> dict[str, object]:
    """Return a part of the profiles as JSON: of whom, when in unix ms, and where it is shown or kept."""
    return {
        "side": part.name,
        "labels": dict(part.labels),
        "from_ms": part.from_ms,
        "to_ms": part.to_ms,
        "url": links.url(place, part) or None,
        "folder": place.folder or None,
    }


def _where_profiles_are(facts: Mapping[str, str], run: Path, request: Mapping[str, Any]) -> list[str]:
    """Return lines that say where a request's profiles are, none for a run without."""
    place = links.Place.of(facts)
    if place is None:
        return []
    if place.folder:
        asking = command_line("export", run, "--format", "pprof", "--requests", request["request_id"])
        return [f"Profiles of that time: {asking}"]
    return [f"Profiles of {part.name}: {links.url(place, part)}" for part in links.windows(request)]


def _reconciled(store: Store, explained: selection.Explained) -> list[Line]:
    return reconciled(points(store, explained.request), explained.request["mode"])


def _print(store: Store, run: Path, keys: list[int] | None, *, reconcile: bool) -> None:
    from kvtrace.report import page, style, tables

    console = style.open_console()
    facts = selection.run_facts(store)
    if keys is None:
        page.print_population(population.summary(store, facts), facts, run.name, console)
        if reconcile:
            page.print_totals(totals.totals(store, facts), console)
        return
    load = population.load(store, facts)
    shown = list(selection.explained(store, keys[:DRAWN_REQUESTS]))
    client_ids = {explained.request["client_request_id"] for explained in shown}
    if len(shown) > 1 and len(client_ids) == 1 and (client_id := client_ids.pop()):
        console.print(tables.attempts([explained.request for explained in shown], client_id, console))
        console.print()
    for position, explained in enumerate(shown):
        if position:
            console.print()
        page.print_request(explained, bool(load and load["saturated"]), console)
        page.print_whole(_where_profiles_are(facts, run, explained.request), console)
        if reconcile:
            console.print()
            console.print(tables.reconciled(_reconciled(store, explained), console))
    if len(keys) > len(shown):
        more = plural(len(keys) - len(shown), "more request is", "more requests are")
        console.print(f"\n{more} not drawn; --json has them all.")
