"""What a recording shows beside its store, as it was asked to: Prometheus metrics, OpenTelemetry spans, profiles."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtrace.cli.profiling import Asked, Profiling
from kvtrace.errors import ExportError, StoreError, UsageError
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrace.collect import Observer
    from kvtrace.collect.retention import Retention
    from kvtrace.exporters.live import SpanObserver

Metrics = Annotated[str | None, typer.Option(metavar="[HOST:]PORT", help="Show Prometheus metrics there, at /metrics.")]
Otlp = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Send each request's spans there: grpc://HOST:4317 or http://HOST:4318."),
]
OtlpShare = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, metavar="0..1", help="With --otlp: requests to send beside slow and failed ones; 1 is all."
    ),
]
GrafanaCopy = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Publish a copy for Grafana there too; its plug-in opens files for writing."),
]
"""The options of `record` that this module serves."""

_SPANS_VARIABLE = "KVTRACE_SPANS"


class Watch:
    """The endpoint and the sender of one recording. Use as a context manager, around whatever is started."""

    def __init__(
        self, output: Path, metrics: str | None, otlp: str | None, share: float | None, profiles: Asked
    ) -> None:
        self._output = output
        self.copies: list[Path] = []
        self._overwrites = False
        self.retention: Retention | None = None
        self._metrics = metrics
        self._otlp = otlp
        self._share = share
        self._profiling = Profiling(profiles)
        self._spools: list[Path] = []
        self._observers: list[Observer] = []
        self._sending: SpanObserver | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        """Open what was asked for, before anything is started. Raises UsageError or ExportError where it cannot be."""
        if self._share is not None and self._otlp is None:
            raise UsageError("--otlp-share belongs to --otlp URL")
        for copy in self.copies:
            _check_copy(copy, self._output, overwrites=self._overwrites)
        try:
            if self._metrics is not None:
                self._open_metrics(self._metrics)
            if self._otlp is not None:
                self._open_spans(self._otlp)
            self._stack.enter_context(self._profiling)
        except BaseException:
            self._stack.close()
            raise
        return self

    def copy_to(self, copy: Path | None, *, overwrites: bool) -> None:
        """Publish a copy there too, if anywhere; `overwrites` whatever store it is that has the name."""
        self.copies = [copy] if copy is not None else []
        self._overwrites = overwrites

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def _open_metrics(self, where: str) -> None:
        try:
            from kvtrace.metrics import live
        except ImportError as error:
            message = f"--metrics needs a package that is missing ({error.name}): pip install 'kvtrace[metrics]'"
            raise ExportError(message) from error
        host, port = live.address(where)
        observer = live.MetricsObserver(self._output, lambda: self._spools, self._spans)
        endpoint = self._stack.enter_context(live.Endpoint(observer.values, host, port))
        sys.stderr.write(f"kvtrace: metrics at {endpoint.url}\n")
        self._observers.append(observer)

    def _open_spans(self, url: str) -> None:
        from kvtrace.exporters import live, otlp

        sender = otlp.Sender(url, {})
        self._stack.callback(sender.close)
        self._sending = live.SpanObserver(sender, live.Sampling(1.0 if self._share is None else self._share))
        self._observers.append(self._sending)
        if self._share in {None, 1.0}:
            # Routers started below hang the engines' spans under their own, which of a share might not be exported.
            before = os.environ.get(_SPANS_VARIABLE)
            os.environ[_SPANS_VARIABLE] = "1"
            self._stack.callback(_restore, before)

    def _spans(self) -> dict[str, int]:
        """Return what became of spans so far."""
        if self._sending is None:
            return {}
        return {"exported": self._sending.health.exported, "dropped": self._sending.health.dropped}

    def observers(self, spools: list[Path]) -> list[Observer]:
        """Return the observers of a recording of these folders."""
        self._spools = list(spools)
        return self._observers

    @property
    def facts(self) -> dict[str, str]:
        """Return what the store is to know: where the run's profiles are."""
        return self._profiling.facts

    @property
    def profiles_url(self) -> str:
        """Return where engines are to send profiles, "" for nowhere."""
        return self._profiling.url

    def report(self) -> Iterator[str]:
        """Yield what is to be said once the recording has ended."""
        yield from self._profiling.report()
        if self._sending is None:
            return
        health = self._sending.health
        yield f"sent {plural(health.exported, 'span')} to {self._otlp}"
        if health.dropped:
            dropped = plural(health.dropped, "span was", "spans were")
            yield f"{dropped} dropped: {health.failure or 'the receiver was too slow'}"


def _check_copy(copy: Path, output: Path, *, overwrites: bool) -> None:
    """Raise StoreError, or UsageError where it is the store itself, unless snapshots can be put there."""
    from kvtrace.store import copies, working_path
    from kvtrace.store.files import is_duckdb, is_of, resolved

    if is_of(resolved(output), resolved(copy)):
        raise UsageError(
            f"--grafana-copy {copy} is the store itself; name another file, in the folder that Grafana sees"
        )
    if copy.is_dir():
        raise StoreError(f"--grafana-copy {copy} is a folder; name a file in it")
    if not copy.parent.is_dir():
        raise StoreError(f"--grafana-copy {copy}: the folder {copy.parent} does not exist; make it first")
    if copy.exists() and not is_duckdb(copy):
        raise StoreError(f"--grafana-copy {copy} is there and no DuckDB file, so it is not overwritten; name another")
    if working_path(copy).exists():
        raise StoreError(f"--grafana-copy {copy} is being recorded ({working_path(copy)} is there); name another file")
    if copy.exists() and not overwrites and not copies.is_copy(copy):
        raise StoreError(
            f"--grafana-copy {copy} is there and no copy that a recording put there; name another file, or --force "
            "overwrites it"
        )


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(_SPANS_VARIABLE, None)
    else:
        os.environ[_SPANS_VARIABLE] = before
