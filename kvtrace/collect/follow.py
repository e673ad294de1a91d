"""Spool folders being followed: which files there are, how far each is read, what comes next."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace import clock, wire
from kvtrace.collect import convert
from kvtrace.collect.ledger import FileKey, Ledger, Position, ProcessRow
from kvtrace.errors import SpoolError, is_text
from kvtrace.segments import SegmentFile
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    Notice = Callable[[str, str], None]  # the subject, and one sentence about it

RECORDS_PER_CHUNK = 491_520  # four DuckDB row groups: what is inserted is written once, in full groups


@dataclass(slots=True)
class Chunk:
    """Part of what one file gave: rows for table event (None for a mere change of position) and the new position.

    Only the last chunk of a batch moves the position, since a batch counts as a whole. `facts` and `dropped` are what
    the file says of its process by now.
    """

    key: FileKey
    process: ProcessRow
    position: Position | None
    events: pa.Table | None
    facts: dict[str, str]
    dropped: dict[int, int]
    oldest_ns: int = 0
    newest_ns: int = 0
    records: int = 0
    """How many the file gave, those left out included."""

    @property
    def rows(self) -> int:
        """How many events it holds."""
        return int(self.events.num_rows) if self.events is not None else 0


@dataclass(slots=True)
class _Followed:
    file: SegmentFile
    path: Path
    inode: int
    process: ProcessRow
    told: tuple[dict[str, str], dict[int, int]] = field(default_factory=lambda: ({}, {}))


@dataclass(frozen=True, slots=True)
class _Look:
    """A file as it was when it was last looked at and found unreadable."""

    size_bytes: int
    modified_ns: int


class Folders:
    """The spool files of several folders. Files and folders may appear, grow and vanish at any time.

    What happened before `from_monotonic_ns` of this moment, by this host's clock, is left out, but for where processes
    and threads stand.
    """

    def __init__(
        self, folders: Iterable[Path], ledger: Ledger, notice: Notice, from_monotonic_ns: Callable[[], int]
    ) -> None:
        self.folders = list(dict.fromkeys(Path(folder) for folder in folders))
        self._ledger = ledger
        self._notice = notice
        self._from_monotonic_ns = from_monotonic_ns
        self._followed: dict[FileKey, _Followed] = {}
        self._key_at: dict[Path, FileKey] = {}
        self._refused: dict[Path, _Look] = {}
        self._paths_of: dict[FileKey, Path] = {}
        self._foreign: set[FileKey] = set()
        self._boot_id = clock.boot_id()

    def scan(self) -> None:
        """Look for new, replaced and vanished files."""
        seen: set[Path] = set()
        for folder in self.folders:
            for entry in _listed(folder):
                path = folder / entry.name
                seen.add(path)
                self._look_at(path, entry)
        for path in self._key_at.keys() - seen:
            self._vanished(path)
        for path in self._refused.keys() - seen:
            del self._refused[path]

    def chunks(self) -> Iterator[Chunk]:
        """Yield what every followed file has to give now, in bounded chunks. Leaves the ledger alone."""
        for key in sorted(self._followed):
            followed = self._followed.get(key)
            if followed is not None:
                yield from self._chunks_of(key, followed)

    @property
    def refused_files(self) -> int:
        """How many files cannot be read, or hold what another one does."""
        return len(self._refused)

    def forget_uncommitted(self) -> None:
        """Go back to the committed positions: what was read since then will be read again."""
        for key in list(self._followed):
            self._drop(key)

    def close(self) -> None:
        """Let go of all files."""
        self.forget_uncommitted()

    def remove_finished(self) -> int:
        """Delete files that are read to their end and finished; return how many."""
        removed = 0
        last_of = dict(sorted(self._paths_of))
        for key, path in list(self._paths_of.items()):
            position = self._ledger.positions.get(key)
            if position is None or not position.finished:
                continue
            if key in self._foreign and last_of[key[0]] == key[1]:
                continue  # a copied folder: whether its writer lives cannot be told from here
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._notice(str(path), f"read to its end and could not be deleted: {error.strerror}")
            else:
                removed += 1
            del self._paths_of[key]
        return removed

    def _look_at(self, path: Path, entry: os.DirEntry[str]) -> None:
        try:
            status = entry.stat()
        except OSError:
            return
        key = self._key_at.get(path)
        if key is not None:
            followed = self._followed.get(key)
            if followed is None or followed.inode == status.st_ino:
                if followed is None and self._is_unfinished(key):
                    self._open(path, status)
                return
            self._drop(key)  # replaced by a newer copy of itself
        look = _Look(status.st_size, status.st_mtime_ns)
        if self._refused.get(path) != look:
            self._open(path, status, look)

    def _is_unfinished(self, key: FileKey) -> bool:
        position = self._ledger.positions.get(key)
        return position is None or not position.finished

    def _open(self, path: Path, status: os.stat_result, look: _Look | None = None) -> None:
        try:
            if not is_text(path.name):
                raise SpoolError(f"{path}: its name is no UTF-8, as those of spool files are")
            file = SegmentFile.open(path)
            key = (file.header.series, file.header.number)
            position = self._ledger.positions.get(key)
            if position is not None and not position.finished and (position.consumed or position.holes):
                file.close()
                file = SegmentFile.open(path, position.consumed, position.holes)
        except (SpoolError, OSError) as error:
            self._refuse(path, str(error), look)
            return
        first_at = self._paths_of.get(key)
        if first_at is not None and first_at != path and first_at.exists():
            file.close()
            self._refuse(path, f"holds the same records as {first_at}; skipped", look)
            return
        self._refused.pop(path, None)
        self._key_at[path] = key
        self._paths_of[key] = path
        if file.header.boot_id != self._boot_id:
            self._foreign.add(key)
        if position is not None and position.finished:
            file.close()
            return
        self._drop(key)  # it was followed at another path that is gone
        self._followed[key] = _Followed(file, path, status.st_ino, self._ledger.admit(file.header))

    def _refuse(self, path: Path, message: str, look: _Look | None) -> None:
        if path not in self._refused:
            self._notice(str(path), message)
        if look is not None:
            self._refused[path] = look

    def _vanished(self, path: Path) -> None:
        key = self._key_at.pop(path)
        if key in self._followed and self._is_unfinished(key):
            # Its pages stay readable while it is open here; what it still holds is taken, then it is let go.
            return
        self._drop(key)
        self._paths_of.pop(key, None)

    def _chunks_of(self, key: FileKey, followed: _Followed) -> Iterator[Chunk]:
        file, process = followed.file, followed.process
        before = (file.consumed, file.holes)
        try:
            batch = file.poll()
        except (SpoolError, OSError) as error:
            self._notice(str(followed.path), f"{error}; what was read before is kept")
            self._drop(key)
            self._key_at.pop(followed.path, None)
            self._refused[followed.path] = _look_of(followed.path)
            return
        is_news = (batch.facts, batch.dropped) != followed.told
        followed.told = (batch.facts, batch.dropped)
        unfilled = batch.lost - sum(batch.dropped.values())
        count = len(batch.records)
        finished = count == 0 and file.sealed
        moved = (file.consumed, file.holes) != before
        position = Position(process.process, str(followed.path), file.consumed, file.holes, unfilled, finished)
        if batch.damaged:
            self._notice(str(followed.path), "holds damaged records, which were left out")
        if count == 0:
            if is_news or finished or moved:
                yield Chunk(key, process, position, None, batch.facts, batch.dropped)
            if finished:
                self._drop(key)
            return
        # Asked once the records are here: one that came after the time was set finds it set.
        from_monotonic_ns = self._from_monotonic_ns()
        unknown = timeless = impossible = 0
        for start in range(0, count, RECORDS_PER_CHUNK):
            part = batch.records[start : start + RECORDS_PER_CHUNK]
            found = convert.to_events(part, batch.strings, process.process, process.offset_ns, from_monotonic_ns)
            unknown += found.unknown
            timeless += found.timeless
            impossible += found.impossible
            moved_to = position if start + RECORDS_PER_CHUNK >= count else None
            times_ns = found.oldest_ns, found.newest_ns
            yield Chunk(key, process, moved_to, found.events, batch.facts, batch.dropped, *times_ns, len(part))
        if unknown:
            message = (
                f"holds stages that this kvtrace does not know, in {plural(unknown, 'record')} or more; upgrade kvtrace"
            )
            self._notice(str(followed.path), message)
        if timeless:
            message = f"holds times that no clock shows, in {plural(timeless, 'record')} or more, which were left out"
            self._notice(str(followed.path), message)
        if impossible:
            message = f"holds amounts that nothing has, in {plural(impossible, 'record')} or more, which were left out"
            self._notice(str(followed.path), message)

    def _drop(self, key: FileKey) -> None:
        followed = self._followed.pop(key, None)
        if followed is not None:
            followed.file.close()


def _look_of(path: Path) -> _Look:
    try:
        status = path.stat()
    except OSError:
        return _Look(-1, -1)
    return _Look(status.st_size, status.st_mtime_ns)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """Return the spool files in a folder; none while the folder does not exist or cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if e.name.endswith(wire.SUFFIX)), key=lambda e: e.name)
    except OSError:
        return []


def grouped(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Yield chunks by the commit: full row groups, and never a part of what one file gave at once."""
    group: list[Chunk] = []
    for chunk in chunks:
        group.append(chunk)
        if chunk.position is not None and sum(member.rows for member in group) >= RECORDS_PER_CHUNK:
            yield group
            group = []
    if group:
        yield group
