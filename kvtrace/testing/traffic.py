"""The events of a fleet, made in columns: requests that wait for steps, hand over, and sometimes go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvtrace import stages
from kvtrace.modes import PULL, PUSH
from kvtrace.testing.fleet import ROUTER, Fleet
from kvtrace.testing.grid import DECODE, PREFILL, Grid

Times = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ODDITIES: tuple[str, ...] = (
    "registration late", "aborted", "reported twice", "no hand-off", "router unseen", "transfer unseen",
    "two chunks", "lease expired", "sent again", "prompt cached on D",
)  # fmt: skip
"""How a request goes wrong, in the order of their numbers; 0 is a tidy request."""

_AT_ONCE = 50_000
_US = 1_000
_MS = 1_000_000
_PROMPT = 600


def batches(fleet: Fleet) -> Iterator[pa.Table]:
    """Yield the events of a fleet as rows of table `event`, in time order within each batch and nearly so beyond."""
    begin_ns = fleet.start_ns
    for number in range(-(-fleet.requests // _AT_ONCE)):
        count = min(_AT_ONCE, fleet.requests - number * _AT_ONCE)
        rng = np.random.default_rng([fleet.seed, number])
        arrived = begin_ns + np.cumsum(rng.exponential(1e9 / fleet.per_s, count)).astype(np.int64)
        made = _Made(fleet, rng, arrived)
        made.requests()
        end_ns = int(arrived[-1])
        made.engines(begin_ns, end_ns if (number + 1) * _AT_ONCE < fleet.requests else end_ns + 10_000 * _MS)
        yield made.table()
        begin_ns = end_ns


class _Made:
    """The events of one batch of requests under construction."""

    def __init__(self, fleet: Fleet, rng: np.random.Generator, arrived: Times) -> None:
        self.fleet, self.rng, self.arrived = fleet, rng, arrived
        self.count = len(arrived)
        self.grid = Grid(fleet)
        self.pair = rng.integers(0, fleet.pairs, self.count)
        self.is_push: Mask = rng.random(self.count) < fleet.push_share
        odd = rng.integers(1, len(ODDITIES) + 1, self.count)
        self.odd = np.where(rng.random(self.count) < fleet.odd_share, odd, 0)
        self.prefill = ROUTER + 1 + 2 * self.pair
        self.decode = ROUTER + 1 + 2 * (fleet.pairs + self.pair)
        self.columns: list[tuple[Any, ...]] = []
        self._words = ["", PUSH, PULL, "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"]
        self._words += [f"{side}{pair}" for side in "pd" for pair in range(fleet.pairs)]

    def after(self, times: Times, least: float, most: float) -> Times:
        """Return times that are later by a random duration, in us."""
        return times + self.rng.integers(int(least * _US), int(most * _US), self.count)

    def is_odd(self, name: str) -> Mask:
        return np.asarray(self.odd == 1 + ODDITIES.index(name))

    def add(
        self, stage: stages.Stage, times: Times, process: Any, who: str, mask: Mask | None = None,
        *payload: Any, ref: Any = 0,
    ) -> None:  # fmt: skip
        """Add one event a request: `who` names it ("front", "p", "d", "" for none), `ref` is a place among names."""
        which = np.flatnonzero(mask) if mask is not None else np.arange(len(times))
        values = [self._column(value, len(times))[which] for value in (*payload, 0, 0, 0, 0)[:4]]
        request = self._name(who, which)
        self.columns.append(
            (
                np.full(len(which), stage.code, np.int32), times[which], self._column(process, len(times))[which],
                request, self._column(ref, len(times))[which], *values,
            )
        )  # fmt: skip

    @staticmethod
    def _column(value: Any, length: int) -> Any:
        return value if isinstance(value, np.ndarray) else np.full(length, value, np.int64)

    def _name(self, who: str, which: Times) -> Times:
        """Return the places of request names among all names: the words, then three names a request."""
        if not who:
            return np.zeros(len(which), np.int64)
        return len(self._words) + self.count * ("front", "p", "d").index(who) + which

    def names(self, who: str) -> Times:
        """Return for every request the place of one of its names."""
        return self._name(who, np.arange(self.count))

    def requests(self) -> None:
        """Add the events of all requests."""
        odd, push = self.is_odd, self.is_push
        front = ~odd("router unseen")
        received = self.arrived
        decided = self.after(received, 50, 150)
        sent_p = self.after(decided, 50, 150)
        mode = np.where(push, 1, 2)
        self.add(stages.ROUTER_RECEIVED, received, ROUTER, "front", front)
        self.add(stages.ROUTER_DECIDED, decided, ROUTER, "front", front, self.pair, self.pair, ref=mode)
        self.add(stages.ROUTER_PREFILL_SENT, sent_p, ROUTER, "front", front)
        again = odd("sent again")
        self.add(stages.ROUTER_PREFILL_SENT, sent_p + 150 * _US, ROUTER, "front", front & again)
        finished, returned, staged = self._on_prefill(sent_p, front)
        late = np.where(odd("registration late"), 120 * _MS, 0)
        sent_d = np.where(push, self.after(decided, 50, 150) + late, self.after(returned, 50, 150))
        self.add(stages.ROUTER_DECODE_SENT, sent_d, ROUTER, "front", front)
        handed = ~odd("no hand-off")
        step = self._to_decode(sent_d, handed)
        noticed = self._transferred(finished, staged, step, handed)
        self._answered(noticed, step, handed, front)

    def _on_prefill(self, sent: Times, front: Mask) -> tuple[Times, Times, Times]:
        """Add what happens on P; return when it finished, when its reply was back, when the blocks were staged."""
        arrived = self.after(sent, 200, 600)
        enqueued = self.after(arrived, 1000, 6000)
        if self.fleet.http:
            self.add(stages.PREFILL_HTTP_RECEIVED, arrived, self.prefill + 1, "front")
        self.add(stages.PREFILL_ENQUEUED, enqueued, self.prefill, "p", None, _PROMPT)
        passed = np.where(self.rng.random(self.count) < 0.2, self.rng.integers(1, 4, self.count), 0)
        first = self.grid.next(PREFILL, self.pair, enqueued) + passed
        chunks = self.is_odd("two chunks")
        last = first + 2 * chunks
        begun = self.grid.times(PREFILL, self.pair, first)[0]
        self.add(stages.PREFILL_CONSIDERED, begun - 40 * _US, self.prefill, "p")
        self.add(stages.PREFILL_ALLOCATED, begun - 30 * _US, self.prefill, "p", None, 38)
        own = np.where(chunks, _PROMPT // 2, _PROMPT)
        self.add(stages.PREFILL_SCHEDULED, begun, self.prefill, "p", None, first, own, 0, _PROMPT)
        again = self.grid.times(PREFILL, self.pair, last)
        rest = _PROMPT - own
        self.add(stages.PREFILL_SCHEDULED, again[0], self.prefill, "p", chunks, last, rest, own, _PROMPT)
        finished = self.after(again[4], 20, 80)
        self.add(stages.PREFILL_FINISHED, finished, self.prefill, "p", None, 38, 1, ref=3)
        responded = self.after(finished, 200, 1000)
        returned = self.after(responded, 200, 600)
        if self.fleet.http:
            self.add(stages.PREFILL_HTTP_RESPONDED, responded, self.prefill + 1, "front", None, 200)
        self.add(stages.ROUTER_PREFILL_RETURNED, returned, ROUTER, "front", front, 200, 1)
        staged = self.after(self.grid.times(PREFILL, self.pair, last + 1)[1], 10, 90)
        return finished, returned, staged

    def _to_decode(self, sent: Times, handed: Mask) -> Times:
        """Add what happens on D before its blocks are there; return the number of D's step behind that."""
        arrived = self.after(sent, 200, 600)
        enqueued = self.after(arrived, 1000, 6000)
        if self.fleet.http:
            self.add(stages.DECODE_HTTP_RECEIVED, arrived, self.decode + 1, "front")
        told = self.names("p")
        remote = handed.astype(np.int64)
        self.add(
            stages.DECODE_ENQUEUED, enqueued, self.decode, "d", None, _PROMPT, 0, remote, ref=np.where(handed, told, 0)
        )
        step = self.grid.next(DECODE, self.pair, enqueued)
        allocated = self.grid.times(DECODE, self.pair, step)[0] - 30 * _US
        self.add(stages.DECODE_CONSIDERED, allocated - 10 * _US, self.decode, "d", None, 0, (_PROMPT - 1) * remote)
        cached = self.is_odd("prompt cached on D")
        self.add(stages.DECODE_ALLOCATED, allocated, self.decode, "d", None, 38, (_PROMPT - 1) * (remote & ~cached))
        return step

    def _transferred(self, finished: Times, staged: Times, step: Times, handed: Mask) -> Times:
        """Add the hand-off itself; return when D's worker had noticed its end."""
        push = self.is_push
        moved = handed & ~self.is_odd("prompt cached on D")
        pushed, pulled = push & moved, ~push & moved
        started = self.grid.times(DECODE, self.pair, step)[1]
        queued = self.after(started, 20, 100)
        sent = self.after(queued, 50, 300)
        read = self.after(sent, 100, 2000)
        self.add(stages.REGISTRATION_QUEUED, queued, self.decode, "d", pushed)
        self.add(stages.REGISTRATION_SENT, sent, self.decode, "d", pushed, 0, 200)
        self.add(stages.REGISTRATION_RECEIVED, read, self.prefill, "d", pushed)
        picked = self.after(staged, 50, 3000)
        self.add(stages.PREFILL_STAGED, staged, self.prefill, "p", pushed)
        self.add(stages.SENDER_PICKED, picked, self.prefill, "p", pushed)
        matched = self.after(np.maximum(picked, read), 10, 50)
        self.add(stages.MATCHED, matched, self.prefill, "p", pushed, ref=self.names("d"))
        loading = self.after(started, 20, 200)
        self.add(stages.LOAD_STARTED, loading, self.decode, "d", pulled, 0, 38, ref=5 + self.pair)
        driver = np.where(push, self.prefill, self.decode)
        prepared = self.after(np.where(push, matched, np.maximum(loading, finished)), 100, 500)
        return self._posted(prepared, driver, moved)

    def _posted(self, prepared: Times, driver: Any, moved: Mask) -> Times:
        number = np.arange(self.count) + int(self.arrived[0] % 1_000_000_000) * 10
        seen = moved & ~self.is_odd("transfer unseen")
        begun = self.after(prepared, 20, 50)
        ended = self.after(begun, 200, 2000)
        noticed = self.after(ended, 1000, 25_000)
        other = self.after(ended, 1000, 25_000)
        done = np.where(self.is_push, other, noticed)
        told = np.where(self.is_push, noticed, other)
        size = 1 << self.rng.integers(19, 22, self.count)
        for who, side in (("p", self.is_push), ("d", ~self.is_push)):
            mask = seen & side
            remote = self.names("d" if who == "p" else "p")
            self.add(stages.PREPARED, prepared, driver, who, mask, number, 20, 0, ref=remote)
            self.add(stages.POST_STARTED, begun, driver, who, mask, number)
            self.add(stages.POST_ENDED, ended, driver, who, mask, number, size, 20)
            self.add(stages.TRANSFER_DONE, done, driver, who, mask, number, done - 200 * _US, 3)
        self.add(stages.NOTIFIED, told, self.decode, "d", seen & self.is_push)
        self.add(stages.NOTIFIED, told, self.prefill, "p", seen & ~self.is_push)
        released = self.after(np.maximum(done, told), 500, 30_000)
        expired = self.is_odd("lease expired")
        self.add(stages.PREFILL_RELEASED, released, self.prefill, "p", moved & ~expired)
        self.add(stages.LEASE_EXPIRED, done - 500 * _US, self.prefill, "p", moved & expired)
        return noticed

    def _answered(self, noticed: Times, step: Times, handed: Mask, front: Mask) -> None:
        """Add the way from the notice to the answer."""
        aborted = self.is_odd("aborted")
        moved = handed & ~self.is_odd("prompt cached on D")
        reported = self.after(noticed, 100, 1000)
        self.add(stages.REPORTED, reported, self.decode, "d", moved)
        self.add(stages.REPORTED, reported + 300 * _US, self.decode, "d", self.is_odd("reported twice") & moved)
        taken = np.where(moved, self.grid.next(DECODE, self.pair, reported + 50 * _US), step)
        ready = self.grid.times(DECODE, self.pair, taken)[0] - 100 * _US
        self.add(stages.READY, np.maximum(ready, reported + 10 * _US), self.decode, "d", moved & ~aborted)
        self.add(stages.DECODE_ABORTED, reported + 400 * _US, self.decode, "d", aborted, ref=4)
        self.add(stages.ROUTER_CANCELLED, reported + 300 * _US, ROUTER, "front", aborted & front)
        own = self.grid.times(DECODE, self.pair, taken)
        known = np.where(handed, _PROMPT - 1, 0)
        alive = ~aborted
        self.add(stages.DECODE_SCHEDULED, own[0], self.decode, "d", alive, taken, _PROMPT - known, known, _PROMPT)
        out = self.after(own[4], 300, 1000)
        self.add(stages.DECODE_FIRST_TOKEN_OUT, out, self.decode + 1, "front", alive & front)
        token = self.after(out, 200, 500)
        self.add(stages.ROUTER_FIRST_TOKEN, token, ROUTER, "front", alive & front)
        outputs = self.rng.integers(8, 32, self.count)
        over = self.grid.times(DECODE, self.pair, taken + outputs)[4]
        self.add(stages.DECODE_FINISHED, over, self.decode, "d", alive, outputs + 1, ref=3)
        self.add(stages.ROUTER_DONE, self.after(over, 400, 900), ROUTER, "front", alive & front, 200, outputs + 1)

    def engines(self, begin_ns: int, end_ns: int) -> None:
        """Add the steps and the sender threads of all engines in that time."""
        for side, number_of in ((PREFILL, self.fleet.prefill), (DECODE, self.fleet.decode)):
            for pair in range(self.fleet.pairs):
                process = number_of(pair)
                numbers = self.grid.between(side, pair, begin_ns, end_ns)
                times = self.grid.times(side, np.full(len(numbers), pair), numbers)
                tokens, requests = (4096, 8) if side == PREFILL else (32, 32)
                said = ((tokens, requests), (), (), (0, 400_000), ())
                for stage, at, payload in zip(_STEP_STAGES, times, said, strict=True):
                    self.add(stage, at, process, "", None, numbers, *payload)
                if side == PREFILL:
                    woke = np.arange(begin_ns // (20 * _MS), end_ns // (20 * _MS)) * (20 * _MS)
                    self.add(stages.SENDER_WOKE, woke, process, "", None, 8 * _MS)
                    self.add(stages.SENDER_SLEPT, woke + 12 * _MS, process, "", None, 12 * _MS)

    def table(self) -> pa.Table:
        """Return all events added so far as one table in time order."""
        gathered = zip(*self.columns, strict=True)
        code, t_ns, process, request, ref, *payload = (np.concatenate(parts) for parts in gathered)
        order = np.argsort(t_ns, kind="stable")
        codes, place = np.unique(code, return_inverse=True)
        names = self._dictionary()
        stage = pa.array([stages.BY_CODE[int(one)].name for one in codes])
        columns = {
            "process": process[order].astype(np.int32),
            "stage": pa.DictionaryArray.from_arrays(pa.array(place[order].astype(np.int32)), stage),
            "t_ns": t_ns[order],
            "request": pa.DictionaryArray.from_arrays(pa.array(request[order].astype(np.int32)), names),
            "ref": pa.DictionaryArray.from_arrays(pa.array(ref[order].astype(np.int32)), names),
            **{slot: values[order] for slot, values in zip("abcd", payload, strict=True)},
        }
        return pa.table(columns)

    def _dictionary(self) -> pa.Array:
        """Return all names: the words, the ids that the router minted, those of P and those of D."""
        stem = pc.binary_join_element_wise("kvt-", self._hex(16), "")
        of_p, of_d = (pc.binary_join_element_wise("cmpl-", stem, "-0-", self._hex(4), "") for _ in range(2))
        return pa.concat_arrays([pa.array(self._words), stem, of_p, of_d])

    def _hex(self, width: int) -> pa.Array:
        """Return one random hexadecimal text a request, of so many bytes."""
        digits = pa.py_buffer(self.rng.bytes(width * self.count).hex().encode())
        offsets = pa.py_buffer(np.arange(0, 2 * width * (self.count + 1), 2 * width, dtype=np.int32))
        return pa.StringArray.from_buffers(self.count, offsets, digits)


_STEP_STAGES = (
    stages.STEP_SCHEDULED, stages.STEP_STARTED, stages.STEP_FORWARDED, stages.STEP_CONNECTED, stages.STEP_ENDED,
)  # fmt: skip
