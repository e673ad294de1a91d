"""A folder of profiles: one gzipped pprof file for each upload of a process, which says itself whose it is."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from kvtrace.errors import SourceError
from kvtrace.profiles import pprof
from kvtrace.profiles.messages import PushRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SUFFIX = ".pb.gz"
LABELS = ("role", "process", "engine", "rank", "connector")
"""What tells processes apart; other labels of a series say how it was sent."""
BUDGET_BYTES = 1 << 30
_NAME = re.compile(r"[a-z]+-[a-z]+\.(\d+)-(\d+)\.\d+\.\d+\.pb\.gz")
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True, order=True)
class Kept:
    """One file: the time that its samples are from, unix ns, and where it is."""

    begin_ns: int
    end_ns: int
    path: Path


def files(folder: Path) -> list[Kept]:
    """Return what a folder keeps, by time; files of other names are nobody's."""
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.glob(f"*{SUFFIX}"))
    return sorted(Kept(int(match[1]), int(match[2]), path) for path, match in named if match)


class Keeper:
    """Writes what processes push into a folder, up to a budget. Any thread may call `keep`."""

    def __init__(self, folder: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        """Make the folder if need be. Raises OSError where nothing can be written to it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".{os.getpid()}.trial").touch()
        (folder / f".{os.getpid()}.trial").unlink()
        self.folder = folder
        self.kept = 0
        self._budget_bytes = budget_bytes
        self._numbers = itertools.count(1)

    def keep(self, body: bytes) -> None:
        """Keep every profile of one push. Raises SourceError for what is none, OSError where there is no room."""
        try:
            push = PushRequest.FromString(pprof.inflated(body))
        except DecodeError as error:
            raise SourceError("this is no push of profiles: its bytes are none of protobuf") from error
        for series in push.series:
            found = {pair.name: pair.value for pair in series.labels}
            labels = {name: found[name] for name in LABELS if found.get(name)}
            for sample in series.samples:
                profile = pprof.parse(sample.rawProfile)
                pprof.labelled(profile, labels)
                self._write(profile, labels)

    def _write(self, profile: Any, labels: Mapping[str, str]) -> None:
        data = pprof.packed(profile)
        if self._budget_bytes < len(data):
            raise OSError(f"{self.folder} has taken {BUDGET_BYTES >> 30} GiB of profiles, which is its limit")
        who = "-".join(_word(labels.get(name, "")) for name in ("role", "process"))
        begin_ns, end_ns = profile.time_nanos, profile.time_nanos + profile.duration_nanos
        name = f"{who}.{max(begin_ns, 0)}-{max(end_ns, 0)}.{os.getpid()}.{next(self._numbers)}{SUFFIX}"
        unfinished = self.folder / f".{name}"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)  # a full disk would get one with every push
            raise
        self._budget_bytes -= len(data)
        self.kept += 1


def _word(text: str) -> str:
    found = _WORD.match(text)
    return found[0] if found else "unknown"


def merged(kept: Iterator[Kept], keep: Any) -> tuple[pprof.Merged, list[str]]:
    """Return the sum of the samples to keep, and a sentence for every file that could not be read."""
    total, failures = pprof.Merged("wall", "nanoseconds"), []
    for one in kept:
        try:
            total.add(pprof.parse(one.path.read_bytes()), keep)
        except (SourceError, OSError) as error:
            failures.append(f"{one.path} is left out: {error}")
    return total, failures
