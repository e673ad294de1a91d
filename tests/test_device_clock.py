"""The end of a forward on a device: stamped when it was, by the device's own events."""

from __future__ import annotations

from instrumented_connectors.device_clock import DeviceClock
from tests import connector_doubles as doubles
from tests.observers import SECOND_RUNNER, stepped, worker


def test_a_forward_on_a_device_is_stamped_when_it_ended_not_when_it_was_launched() -> None:
    device = doubles.Device()
    clock = DeviceClock(device, device.now)
    device.work_ends_ns = device.host_ns + 30_000_000
    clock.mark(1)
    assert list(clock.passed()) == []

    device.host_ns += 40_000_000
    [(step, passed_ns)] = clock.passed()
    assert step == 1
    assert abs(passed_ns - device.work_ends_ns) < 20_000
    assert not device.waited


def test_a_mark_is_never_placed_before_it_was_made_or_after_it_was_seen() -> None:
    device = doubles.Device()
    clock = DeviceClock(device, device.now)
    clock.mark(1)
    recorded_ns = device.host_ns
    [(_, passed_ns)] = clock.passed()

    assert recorded_ns - 1_000 <= passed_ns <= device.host_ns


def test_a_worker_on_a_device_emits_the_forward_later(memory: doubles.Memory, connector: doubles.Connector) -> None:
    device = doubles.Device()
    worker(memory, connector, device_clock=DeviceClock(device, device.now))
    device.work_ends_ns = device.host_ns + 5_000_000
    stepped(connector, 7, SECOND_RUNNER)
    assert memory.names == ["step.started", "step.connected"]

    device.host_ns += 10_000_000
    stepped(connector, 8, SECOND_RUNNER)
    forwarded = memory.of("step.forwarded")[0]
    assert forwarded.numbers == (7, 1, 1, 0)
    assert abs(forwarded.t_ns - device.work_ends_ns) < 20_000
