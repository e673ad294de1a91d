"""When work on an accelerator has ended, on the host's clock, without ever waiting for the device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from instrumented_connectors.watch import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CALIBRATE_EVERY_NS = 5_000_000_000
_CALIBRATION_POLLS = 50
_TIGHT_NS = 200_000
_MARKS_IN_FLIGHT = 64


class DeviceClock:
    """Marks points on the device's own stream and tells later when they passed.

    A mark is a timing event behind what the host has launched. Its distance to a reference event gives
    its time; the reference is recorded on a stream of its own, where nothing delays it, and polled a
    few times at once, which brackets its time on the host's clock. The reference is renewed every few
    seconds, since the clocks drift and distances are single precision. A mark that passed is never
    placed before it was recorded or after it was first seen to have passed.
    """

    def __init__(self, device: Any, clock: Callable[[], int] = now_ns) -> None:
        """Take the module of the device's kind (`torch.cuda`), or what has its Event and Stream."""
        self._device = device
        self._clock = clock
        self._stream: Any = None
        self._reference: Any = None
        self._reference_ns = 0
        self._calibrated_ns = 0
        self._marks: deque[tuple[int, Any, int]] = deque(maxlen=_MARKS_IN_FLIGHT)

    def mark(self, step: int) -> None:
        """Record an event behind what has been launched so far."""
        now = self._clock()
        if self._reference is None or now - self._calibrated_ns > _CALIBRATE_EVERY_NS:
            self._calibrate(now)
        event = self._device.Event(enable_timing=True)
        event.record()
        self._marks.append((step, event, self._clock()))

    def passed(self) -> Iterator[tuple[int, int]]:
        """Yield (step, host time in ns) of every mark that has passed by now, in order."""
        while self._marks and self._marks[0][1].query():
            now = self._clock()
            step, event, recorded_ns = self._marks.popleft()
            if self._reference is None:
                continue  # no bracket was tight enough: better no time than a wrong one
            passed_ns = self._reference_ns + int(self._reference.elapsed_time(event) * 1e6)
            yield step, min(max(passed_ns, recorded_ns), now)

    def _calibrate(self, now: int) -> None:
        """Renew the reference if a few polls bracket it tightly; else keep the one there is and try again later."""
        if self._stream is None:
            self._stream = self._device.Stream()
        reference = self._device.Event(enable_timing=True)
        begin = self._clock()
        reference.record(self._stream)
        for _ in range(_CALIBRATION_POLLS):
            pending_ns = self._clock()
            if reference.query():
                end = self._clock()
                if end - begin <= _TIGHT_NS:
                    self._reference, self._reference_ns = reference, (begin + end) // 2
                    self._calibrated_ns = now
                return
            begin = max(begin, pending_ns)


def device_clock(kind: str) -> DeviceClock | None:
    """Return a clock for this kind of device, None on CPUs, where the host's own clock will do."""
    if kind == "cpu":
        return None
    import torch

    return DeviceClock(getattr(torch, kind))
