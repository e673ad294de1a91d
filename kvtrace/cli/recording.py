"""A recording in the background of a command: the recorder, the private spool folder, what is said of both."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.cli import writers
from kvtrace.messages import command_line, say
from kvtrace.spool import PRIVATE_PREFIX
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtrace.cli.watching import Watch
    from kvtrace.collect import Recorder

LATER_NS = (1 << 63) - 1
"""A time that is later than all others: nothing is recorded as yet."""
_LAST_OF_ITS_OWN = 128
"""Exit codes beyond it are this and a signal's number."""
_SPOOL_FREE_BYTES = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  private folders are made in it


@dataclass
class Ended:
    """How the recorded command ended: its exit code, 0 until it has."""

    code: int = 0

    @property
    def failed(self) -> bool:
        """Return whether it failed by itself, and was not ended by a signal (128 + n)."""
        return 0 < self.code <= _LAST_OF_ITS_OWN


@contextmanager
def recording(
    output: Path,
    spools: list[Path],
    facts: Mapping[str, str],
    watch: Watch,
    *,
    force: bool,
    delete_consumed: bool = True,
    from_monotonic_ns: int = 0,
    ended: Ended | None = None,
) -> Iterator[Recorder]:
    """Follow the folders in the background; at the end publish, clear private folders, say what was written.

    What happened before `from_monotonic_ns`, by this host's monotonic clock, is left out; the recorder's attribute of
    that name may be set later. What is said depends on how the recorded command `ended`, if one was recorded.
    """
    recorder: Recorder | None = None
    try:
        from kvtrace.collect import Recorder

        recorder = Recorder(
            output,
            spools,
            {"host": platform.node(), **facts, **watch.facts},
            delete_consumed=delete_consumed,
            force=force,
            observers=watch.observers(spools),
            copies=watch.copies,
            retention=watch.retention,
        )
        recorder.from_monotonic_ns = from_monotonic_ns
        with recorder:
            recorder.start()
            spools_again = [word for spool in recorder.spools for word in ("--spool", spool)]
            resume = command_line("record", "-o", output, *spools_again)
            say(f"recording into {output}; should this recorder be killed, `{resume}` completes it")
            yield recorder
    finally:
        followed = recorder.spools if recorder is not None else spools
        for spool in followed:
            if is_private(spool):
                _clear_or_say(spool, output)
    _report(recorder, ended or Ended())
    for message in watch.report():
        say(message)


def _report(recorder: Recorder, ended: Ended) -> None:
    """Say what was written and what to type next."""
    stats = recorder.stats
    if ended.failed and not stats.requests:
        say(_failure_told(ended.code, stats.events))
    for message in stats.messages:
        say(message)
    _report_unsaid(recorder)
    if stats.lost:
        lost = plural(stats.lost, "event was", "events were")
        say(f"{lost} lost; `{command_line('sql', recorder.output, 'drops')}` says where")
    if not stats.events and not ended.failed:
        say("no event arrived: no vLLM process in whose environment kvtrace is installed wrote to the spool")
    counts = (
        plural(stats.requests, "request"),
        plural(stats.events, "event"),
        plural(stats.processes, "process", "processes"),
    )
    say(f"wrote {recorder.output}: {', '.join(counts)}")
    if stats.requests or recorder.resumed:
        say(f"next: {command_line('explain', recorder.output)}")


def _failure_told(code: int, events: int) -> str:
    """Return what is said first of a command that failed before anything was served."""
    early = "any request was served" if events else "any engine wrote an event"
    why = "what it printed says why" + ("" if events else "; `kvtrace doctor` checks what engines need")
    return f"the command ended with exit code {code} before {early}: {why}"


def _report_unsaid(recorder: Recorder) -> None:
    """Say of which kinds there are more messages than were shown, and where they can be read."""
    from kvtrace.collect.notices import KEPT, SHOWN

    stats = recorder.stats
    if not stats.unsaid:
        return
    for kind, count in stats.unsaid.items():
        say(f"and {plural(count, 'more message')} like those: {kind or 'of other kinds'}")
    kept = (
        f"the store keeps the first {KEPT:,} of a kind" if max(stats.unsaid.values()) > KEPT - SHOWN else "all of them"
    )
    asking = command_line("sql", recorder.output, "recorder_messages", "-p", f"limit={stats.kept_messages}", "--csv")
    say(f"{kept}: {asking}")


def make_spool() -> Path:
    """Return a new private folder, in shared memory where there is room, so that no disk slows the engines down."""
    folder = Path(tempfile.gettempdir())
    with suppress(OSError):
        if shutil.disk_usage(_SHARED_MEMORY).free >= _SPOOL_FREE_BYTES and os.access(_SHARED_MEMORY, os.W_OK):
            folder = _SHARED_MEMORY
    return Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=folder))


def is_private(folder: Path) -> bool:
    """Return True for a folder that a recorder made for itself."""
    return folder.name.startswith(PRIVATE_PREFIX) and folder.parent in {_SHARED_MEMORY, Path(tempfile.gettempdir())}


def _clear_or_say(folder: Path, output: Path) -> None:
    """Remove a private folder, or say why it is kept, for whom, and how what still comes is recorded."""
    from kvtrace.store import working_path

    left = writers.given(folder)
    if not left and next(folder.glob("*.kvt"), None) is None:
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return
    # What is finished is not overwritten; a recording that broke off is completed.
    target = output if working_path(output).exists() else output.with_stem(f"{output.stem}.rest")
    resume = command_line("record", "-o", target, "--spool", folder)
    why = f"{writers.told(left)} may still write to it" if left else "not everything in it is in the store"
    say(f"{folder} is kept: {why}; `{resume}` records that")
    if left:
        say("a script is recorded for as long as it runs: have it wait for what it starts")
