"""The recorder: the only writer of a store. It follows spool folders and publishes whole snapshots.

What makes it safe to kill: events and the positions they were read from are committed together, spool files are
deleted only once a *published* snapshot holds what they held, and publication is one rename. So a restart goes on
from the working file, and if even that is torn, from the last snapshot and the files that are still there.
"""

from __future__ import annotations

import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from kvtrace import analyze
from kvtrace.collect import working
from kvtrace.collect.answering import Answers
from kvtrace.collect.follow import Chunk, Folders, grouped
from kvtrace.collect.ledger import FileKey, Ledger, Position
from kvtrace.collect.notices import Notices
from kvtrace.collect.observing import Audience
from kvtrace.collect.publishing import Pace
from kvtrace.collect.retention import Retention
from kvtrace.collect.stats import Stats
from kvtrace.errors import KvtraceError, StoreError
from kvtrace.store import Store, copies, discard, working_path
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtrace.collect.answering import Analysis
    from kvtrace.collect.observing import Observer

POLL_INTERVAL_S = 0.25  # from one look at the spool to the next: a commit costs much the same however little is in it
DRAIN_PASSES_MAX = 5  # emitters that still run would keep a longer drain busy for ever


class Recorder:
    """Records spool folders into `output`. Use as a context manager; `start` and `stop`, or `run_once`."""

    def __init__(
        self,
        output: Path,
        spools: Iterable[Path],
        facts: Mapping[str, str],
        publish_interval_s: float = 2.0,
        delete_consumed: bool = True,
        *,
        force: bool = False,
        analysis: Analysis | None = analyze.worked_out,
        observers: Iterable[Observer] = (),
        copies: Iterable[Path] = (),
        retention: Retention | None = None,
    ) -> None:
        self.output = Path(output)
        self.spools = [Path(spool) for spool in spools]
        self.facts = dict(facts)
        self.stats = Stats()
        self._notices = Notices(self.stats)
        self.resumed = False
        self.from_monotonic_ns = 0  # what happened before on this host is left out; any thread may set it
        self.failure: KvtraceError | None = None
        self._pace = Pace(self.output, publish_interval_s)
        self._copies = [Pace(Path(copy), publish_interval_s) for copy in copies]
        self._retention = retention or Retention()
        self._delete_consumed = delete_consumed
        self._force = force
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._audience = Audience(observers, self._notices.add)
        self._answers = Answers(analysis, self.stats, self._notices.add)
        self._is_unpublished = False
        self._store: Store | None = None

    def __enter__(self) -> Recorder:
        self._open()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Follow, commit, analyse and publish on a thread of its own until `stop`."""
        self._open()
        self._thread = threading.Thread(target=self._follow, name="kvtrace-recorder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take in what has been emitted by now, publish it as the finished store, and end. May be called twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._end()

    def run_once(self) -> Stats:
        """Take in what is there, publish it as the finished store, end, and return what was done."""
        self._open()
        self._end()
        return self.stats

    # Opening ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._store is not None:
            return
        if not self.output.parent.is_dir():
            raise StoreError(f"{self.output.parent} is not a folder; make it, or name another output")
        if self._force:
            discard(self.output)
        self.resumed = working_path(self.output).exists()
        if not self.resumed and self.output.exists():
            raise StoreError(f"{self.output} exists and is not overwritten; use --force or name another output")
        self._store = working.opened(self.output, self._notices.add)
        self._ledger = Ledger.load(self._store)
        self._load_run(self._store)
        self._folders = Folders(self.spools, self._ledger, self._notices.add, lambda: self.from_monotonic_ns)
        if not self.resumed:
            self._publish(self._store)

    def _load_run(self, store: Store) -> None:
        """Note the run's facts; when resuming, go on with the folders that the interrupted recording followed."""
        known = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
        if self.resumed:
            earlier = [Path(line) for line in known.get("recorder.spool", "").splitlines()]
            self.spools = list(dict.fromkeys([*(spool.absolute() for spool in self.spools), *earlier]))
            self.stats.events = int(store.select("SELECT count(*) FROM event").values[0][0])
            self._answers.backlog.resume(store, known)
            self._retention.resume(known)
            said = f"resumed an interrupted recording at {plural(self.stats.events, 'event')}"
            self._notices.add(str(self.output), said)
        self.spools = [spool.absolute() for spool in self.spools]
        created = {} if "created_ns" in known else {"created_ns": str(time.time_ns())}
        store.remember({**created, "python": platform.python_version(), **self.facts, **self._own_facts("recording")})

    # Following ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        if self.resumed:
            self._guarded(self._catch_up)
        while not self._stopping.is_set():
            next_s = time.monotonic() + POLL_INTERVAL_S
            self._guarded(self._pass)
            if self._pace.is_due:
                self._guarded(self._analyze_and_publish)
            elif self._pace.is_refused:
                self._guarded(self._publish_again)
            self._stopping.wait(max(0.0, next_s - time.monotonic()))

    def _catch_up(self, store: Store) -> None:
        """Publish what has come before it is analysed, which takes its time."""
        self._pass(store)
        self._write_own(store, "recording")
        self._publish(store)

    def _guarded(self, part: Callable[[Store], object]) -> None:
        """Run one part of the work; a failure is noted and tried again later, since the spool keeps the events."""
        assert self._store is not None  # noqa: S101 -- opened before the thread starts
        try:
            part(self._store)
        except (KvtraceError, OSError) as error:
            self.failure = error if isinstance(error, KvtraceError) else StoreError(str(error))
            self.stats.failing = True
            self._notices.add(str(self.output), str(error))
        else:
            self.failure, self.stats.failing = None, False

    def _end(self) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        try:
            for _ in range(DRAIN_PASSES_MAX):
                if not self._pass(store):
                    break
            self._answers.finish(store)
            self._write_own(store, "recording")  # observers read the run's facts
            self._audience.analyzed(store, self.stats, is_last=True)
            self._audience.finish()
            self._write_own(store, "complete")
            if self._answers.conclude(store):  # nobody is under way any more, as the facts now say
                self._write_own(store, "complete")
            for copy in self._copies:
                self._put_copy(store, copy, at_any_cost=True)
            store.finish(self.output)
            self.stats.published += 1
            self._remove_finished()
        finally:
            self._folders.close()
            store.close()

    def _pass(self, store: Store) -> int:
        """Commit what all files have to give now; return how many records that was, those left out included."""
        began_ns = time.time_ns()
        self._folders.scan()
        try:
            records = self._commit_all(store)
        except BaseException:
            self._folders.forget_uncommitted()
            raise
        self._audience.took_in(began_ns)
        self.stats.skipped_files = self._folders.refused_files
        return records

    def _commit_all(self, store: Store) -> int:
        groups = grouped(self._folders.chunks())
        total = 0
        # Files are read on a thread of their own while DuckDB, which lets go of the interpreter, inserts.
        with ThreadPoolExecutor(1, "kvtrace-reader") as reader:
            arriving = reader.submit(next, groups, None)
            while (group := arriving.result()) is not None:
                arriving = reader.submit(next, groups, None)
                total += self._commit(store, group)
        return total

    def _commit(self, store: Store, chunks: list[Chunk]) -> int:
        positions: dict[FileKey, Position] = {c.key: c.position for c in chunks if c.position is not None}
        tables = [chunk.events for chunk in chunks if chunk.events is not None]
        for chunk in chunks:
            self._ledger.note(chunk.process, chunk.facts, chunk.dropped)
            if chunk.rows:
                chunk.process.saw(chunk.oldest_ns, chunk.newest_ns)
        # Joined, since many small inserts cost more than one large one.
        events = pa.concat_tables(tables) if tables else None
        oldest_ns = min((chunk.oldest_ns for chunk in chunks if chunk.rows), default=None)
        with store.transaction():
            if events is not None:
                store.append("event", events)
            self._ledger.write(store, positions)
            self._answers.backlog.owe(store, oldest_ns)
        self._ledger.committed(positions)
        self._is_unpublished = True
        self._answers.backlog.came(oldest_ns)
        if oldest_ns is not None:
            self.stats.lag_s = max(0.0, (time.time_ns() - max(chunk.newest_ns for chunk in chunks)) / 1e9)
        self.stats.events += sum(chunk.rows for chunk in chunks)
        self.stats.lost = self._ledger.lost_records()
        self.stats.processes = len(self._ledger.processes)
        if events is not None:
            self._audience.took(store, events)
        return sum(chunk.records for chunk in chunks)

    # Publishing ---------------------------------------------------------------------------------------

    def _analyze_and_publish(self, store: Store) -> None:
        is_new = self._is_unpublished or self._answers.conclusions.is_due
        if not self._answers.is_analysis_due and not is_new and not self._notices.unwritten:
            self._audience.analyzed(store, self.stats)
            return
        if is_behind := self._answers.backlog.since_ns is not None:
            self._audience.analysis_begins()
            self._answers.catch_up(store, self._answers.backlog.since_ns, self._publish_meanwhile)
        else:
            self._is_unpublished |= self._answers.conclusions.refresh(store)
        self._write_own(store, "recording")
        self._audience.analyzed(store, self.stats)
        if is_behind:
            self._pass(store)  # what has come meanwhile need not wait for the next snapshot
        self._retention.apply(store)
        self._publish(store)
        if is_behind:  # what the answers say comes with the next snapshot: this one's events do not wait for it
            self._is_unpublished |= self._answers.conclusions.refresh(store)

    def _publish_meanwhile(self) -> None:
        """Publish what has come since an analysis began that takes its time: hours of events, or no processor."""
        if self._pace.is_late and not self._stopping.is_set():
            self._pace.pause(POLL_INTERVAL_S)  # should it fail or be refused
            self._guarded(self._catch_up)

    def _publish_again(self, store: Store) -> None:
        """Publish what somebody kept from being published as soon as he lets go, without another analysis."""
        if store.is_cheap_to_publish(self.output):
            self._publish(store)

    def _publish(self, store: Store) -> None:
        """Publish the store and its copies, and delete what they hold from the spool, unless that has to wait."""
        if not self._pace.publish(store, work=self._answers.work):
            return
        self._is_unpublished = False
        self.stats.was_published(self._pace.cost_s, self._pace.published_ns)
        for copy in self._copies:
            if copy.is_due:
                self._put_copy(store, copy)
        self._remove_finished()

    def _put_copy(self, store: Store, copy: Pace, *, at_any_cost: bool = False) -> None:
        """Publish a copy beside the store; that it cannot be put there does not keep the store from being published."""
        try:
            if copy.publish(store, at_any_cost=at_any_cost):
                self.stats.publishing_s += copy.cost_s
        except StoreError as error:
            copy.pause(POLL_INTERVAL_S)
            self._notices.add(str(copy.target), str(error))

    def _remove_finished(self) -> None:
        if self._delete_consumed:
            self.stats.removed_files += self._folders.remove_finished()

    def _write_own(self, store: Store, state: str) -> None:
        notices = list(self._notices.unwritten)
        with store.transaction():
            if notices:
                store.append("recorder", pa.Table.from_pylist(notices))
            store.remember({**self._ledger.facts(), **self.facts, **self._own_facts(state)})
        del self._notices.unwritten[: len(notices)]

    def _own_facts(self, state: str) -> dict[str, str]:
        return {
            "recorder.state": state,
            "recorder.spool": "\n".join(str(spool) for spool in self.spools),
            "recorder.published_ns": str(time.time_ns()),
            **self.stats.facts(),
            **copies.fact(copy.target for copy in self._copies),
            **self._retention.facts(),
            **self._audience.facts(),
        }
