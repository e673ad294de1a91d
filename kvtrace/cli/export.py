"""`kvtrace export`: a store, or a part of it, in the formats of other tools."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvtrace.cli import target
from kvtrace.cli.signals import ended_in_order
from kvtrace.errors import ExportError, UsageError
from kvtrace.exporters.source import NEVER_NS, Choice, batches
from kvtrace.messages import quoted, say
from kvtrace.report import selection
from kvtrace.store import Store
from kvtrace.wording import plural

_MEMORY_BYTES = 512 * 1024 * 1024
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Format(StrEnum):
    """What can be written."""

    PERFETTO = "perfetto"
    OTLP_JSON = "otlp-json"
    OTLP = "otlp"
    PARQUET = "parquet"
    PPROF = "pprof"


_SUFFIXES = {
    Format.PERFETTO: ".perfetto-trace",
    Format.OTLP_JSON: ".otlp.jsonl",
    Format.PARQUET: ".parquet",
    Format.PPROF: ".pb.gz",
}
_NEXT = {
    Format.PERFETTO: "open it at ui.perfetto.dev, which loads it into your browser and nowhere else",
    Format.OTLP_JSON: "a collector reads it with its otlpjsonfile receiver",
    Format.PARQUET: "every file is a table of the store",
    Format.PPROF: "open it with `go tool pprof -http :`, at speedscope.app, or in Grafana",
}


@ended_in_order()
def command(
    run: Annotated[Path, typer.Argument(metavar="RUN.duckdb", help="The store that `kvtrace record` wrote.")],
    form: Annotated[Format, typer.Option("--format", "-f", help="What to write.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE|DIR", help="Where; - is stdout. Default: beside the store."),
    ] = None,
    requests: Annotated[
        list[str] | None,
        typer.Option("--requests", metavar="ID", help="Only this request; may be repeated. Ids as in `explain`."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="Only requests that start then or later (ISO 8601, UTC)."),
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Only requests that start before.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="With --format otlp: the OTLP receiver, gRPC or HTTP.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--class", metavar="compute|coordination|transfer", help="With --format pprof: only that connector work."
        ),
    ] = None,
    profile_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --format pprof: where the profiles are now. Default: as recorded."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> int:
    """Export requests to Perfetto, OpenTelemetry or Parquet. Every number is the one that `explain` shows.

    With --format pprof: the profiles of a time, of requests, of a class, merged into one.
    """
    if form is not Format.PPROF and (kind is not None or profile_dir is not None):
        raise UsageError(f"--{'profile-dir' if kind is None else 'class'} belongs to --format pprof")
    if (form is Format.OTLP) != (endpoint is not None):
        raise UsageError("--format otlp and --endpoint URL belong together")
    if form is Format.OTLP and output is not None:
        raise UsageError("--format otlp sends and writes no file: leave -o away, or use --format otlp-json")
    span = _span(begin, end)
    with Store.open(run, memory_bytes=_MEMORY_BYTES) as store:
        keys = tuple(key for name in dict.fromkeys(requests or ()) for key in selection.find_keys(store, name))
        choice = Choice(keys if requests else None, *span)
        if form is Format.OTLP:
            return _send(store, choice, endpoint or "")
        output = output or run.with_name(run.stem + _SUFFIXES[form])
        if form is Format.PPROF:
            _write_profile(store, choice, run, output, kind or "", profile_dir, force=force)
            return 0
        if form is not Format.PARQUET:
            with target.opened(output, run, force=force) as out:
                count = _write_file(store, choice, out, form)
            _report(output, form, count)
            _report_nothing(store, count, span)
            return 0
    # DuckDB allows no second connection of other rights beside the first.
    _write_folder(run, choice, output, force=force)
    return 0


def _span(begin: str | None, end: str | None) -> tuple[int, int]:
    """Return from when and until when, unix ns. Raises UsageError for an end that is no later."""
    span = _time(begin, "--from", 0), _time(end, "--to", NEVER_NS)
    if begin and end and span[0] >= span[1]:
        raise UsageError(f"--from {begin} is not before --to {end}, so nothing can start in between")
    return span


def _time(text: str | None, option: str, default_ns: int) -> int:
    """Return a time as unix ns; one without a zone is UTC."""
    if text is None:
        return default_ns
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{option} wants a time such as 2026-11-29T12:00:00, not {text!r}") from error
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000


def _write_folder(run: Path, choice: Choice, folder: Path, *, force: bool) -> None:
    from kvtrace.exporters import parquet

    target.check_folder(folder, "*.parquet", force=force)
    written = parquet.write(run, choice, folder)
    _report(folder, Format.PARQUET, written["request"])
    if not written["request"]:
        with Store.open(run) as store:
            _report_nothing(store, 0, (choice.from_ns, choice.to_ns))
    if not choice.is_everything:
        names = " and ".join(sorted(parquet.COUNTED))
        hold = "hold the windows that lie wholly in that time" if choice.keys is None else "are empty"
        say(f"tables {names} count all requests of a window of time, so they {hold}")


def _write_file(store: Store, choice: Choice, out: BinaryIO, form: Format) -> int:
    """Write what a format wants of the requests chosen and return how many there are."""
    if form is Format.PERFETTO:
        from kvtrace.exporters import perfetto

        return perfetto.write(store, choice, out)
    from kvtrace.exporters import otlp_json, spans, traces

    facts = spans.RunFacts.of(store)
    whole = (traces.spans(told, facts) for batch in batches(store, choice) for told in batch)
    return otlp_json.write(whole, out, facts.resource)


def _write_profile(
    store: Store, choice: Choice, run: Path, output: Path, kind: str, folder: Path | None, *, force: bool
) -> None:
    try:
        from kvtrace.profiles import selection as profiles
    except ImportError as error:
        raise ExportError(
            f"--format pprof needs a package that is missing ({error.name}): pip install 'kvtrace[profiles]'"
        ) from error
    if kind and kind not in profiles.CLASSES:
        raise UsageError(f"--class is {', '.join(profiles.CLASSES)}, not {kind!r}")
    chosen, place = profiles.wanted(store, choice, kind), profiles.place(store, folder)
    with target.opened(output, run, force=force) as out:
        count, failures = profiles.write(place, chosen, out)
    for failure in failures:
        say(failure)
    if output != target.STDOUT:
        say(f"wrote {quoted(str(output))}: {plural(count, 'profile')} merged; {_NEXT[Format.PPROF]}")


def _send(store: Store, choice: Choice, endpoint: str) -> int:
    """Send all requests chosen; return 1 unless every span was taken."""
    from kvtrace.exporters import otlp, spans, traces

    facts = spans.RunFacts.of(store)
    with otlp.Sender(endpoint, facts.resource, waits=True) as sender:
        count = 0
        for batch in batches(store, choice):
            for told in batch:
                sender.offer(traces.spans(told, facts))
                count += 1
    health = sender.health
    say(f"sent {plural(health.exported, 'span')} of {plural(count, 'request')} to {endpoint}")
    _report_nothing(store, count, (choice.from_ns, choice.to_ns))
    if health.dropped:
        dropped = plural(health.dropped, "span was", "spans were")
        say(f"{dropped} not taken: {health.failure or 'no reason was given'}")
    return 1 if health.dropped else 0


def _report(path: Path, form: Format, count: int) -> None:
    if path != target.STDOUT:
        say(f"wrote {quoted(str(path))}: {plural(count, 'request')}; {_NEXT[form]}")


def _report_nothing(store: Store, count: int, span: tuple[int, int]) -> None:
    """Where a choice of time left no request, say when those of the store start."""
    if count or span == (0, NEVER_NS):
        return
    first, last = store.rows("SELECT min(start_ns) AS first, max(start_ns) AS last FROM request", {})[0].values()
    if first is None:
        say("the store holds no request")
        return
    # A microsecond more than the last, so that both are arguments that choose all of them.
    between = f"--from {_written(first)} --to {_written(last + 1000)}"
    say(f"no request that was asked for starts in that time; those of the store do with {between}")


def _written(time_ns: int) -> str:
    """Return a unix time as `--from` and `--to` take it, in UTC."""
    return (_EPOCH + dt.timedelta(microseconds=time_ns // 1000)).strftime("%Y-%m-%dT%H:%M:%S.%f")
