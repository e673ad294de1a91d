"""Whatever goes wrong in tracing, every request is answered as without it, and the log says so once per process."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine import raising
from tests.engine.conftest import Deployments
from tests.engine.raising import Bench
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

# Called only where an engine fails or ends, by other model runners, or where a transfer lasts: proved over doubles.
NOT_CALLED = (".failed", ".shutdown.before", ".release_dlist_handle.before", ".request_finished.after",
              ".finish_forward.before", "Probe._poll")  # fmt: skip
HEARTBEATS = {"push": (), "pull": ("send_notif.before", "send_notif.after")}
"""Called in pull only while a transfer lasts."""
PROBED = {"KVTRACE_PROBE": "1", "KVTRACE_VERIFY_KV": "1"}
MANY = 8
"""Requests whose events fill a window of the spool within seconds."""


@contextmanager
def bench(
    deployments: Deployments, mode: str, folder: Path, armed: str, **environment: dict[str, str]
) -> Iterator[Bench]:
    """Run a lab with hooks that can be armed, once no other lab runs."""
    deployments.close()
    one = Bench(mode, folder, armed, **environment)
    with one.lab:
        yield one


# `connector` and not `mode`, since these tests have labs of their own.
@pytest.mark.parametrize("connector", ["push", "pull"])
def test_no_hook_and_no_state_of_the_spool_changes_an_answer(
    deployments: Deployments, connector: str, tmp_path: Path
) -> None:
    """While engines start every hook raises once, then one after the other; then the spool folder goes bad."""
    with bench(deployments, connector, tmp_path, raising.EACH, prefill=PROBED, decode=PROBED) as one:
        expected = one.ask(one.lab.engines[1].url, MANY)  # D alone, without a hand-off
        assert all(status == 200 and len(tokens) == 4 for status, tokens, _ in expected)
        assert len({tokens for _, tokens, _ in expected}) == MANY
        assert one.ask() == expected[:2]
        raised = set(one.switch.raised())
        for hook in sorted(one.switch.hooks()):
            raised |= check_hook(one, hook, expected)
        silent = one.switch.hooks() - raised
        assert not {hook for hook in silent if not hook.endswith(NOT_CALLED + HEARTBEATS[connector])}

        if connector == "push":  # with most threads; no connector knows in what state the spool is
            check_removed(one, expected)
            check_unwritable(one, expected, tmp_path)
            check_full(one, expected, tmp_path)


def check_hook(one: Bench, hook: str, expected: list[object]) -> set[str]:
    """Let one hook raise: same answers, and each process in which it did says so once, in the log and the spool."""
    said: list[str] = []
    with one.fresh(hook):
        assert one.ask(requests=1) == expected[:1], hook
        time.sleep(0.05)  # what engines still do for it

        def is_said_where_it_raised() -> bool:
            said.append(one.said())
            return raising.pids(raising.OFF, "".join(said)) == sorted(one.switch.raised().get(hook, ()))

        until(is_said_where_it_raised, what=f"each process says once that {hook} ended tracing")
        raised = one.switch.raised()
    assert raised.keys() <= {hook}
    reasons = one.disabled()
    assert len(reasons) == len(raised.get(hook, ())), f"{hook}: {reasons}"
    assert all(hook in reason for reason in reasons)
    return set(raised)


def check_unwritable(one: Bench, expected: list[object], folder: Path) -> None:
    """Begin tracing in a folder that cannot be written to."""
    with raising.tmpfs(folder / "read-only", "ro") as spool:
        one.point_to(spool)
        with one.fresh("nothing"):
            assert one.ask() == expected[:2]
        without = raising.pids(raising.UNUSABLE, one.said())
        assert len(without) == len(set(without)) >= 4  # API servers, cores and workers of two engines


def check_full(one: Bench, expected: list[object], folder: Path) -> None:
    """Run the file system of the spool full."""
    said = ""
    with raising.tmpfs(folder / "small", "size=2m") as spool:
        one.point_to(spool)
        with one.fresh("nothing"):
            for _ in range(60):
                assert one.ask(requests=MANY) == expected
                said += one.said()
                if raising.pids(raising.NO_ROOM, said):
                    break
            assert one.ask(requests=MANY) == expected
        said += one.said()
        for line in (raising.UNUSABLE, raising.NO_ROOM):
            assert len(raising.pids(line, said)) == len(set(raising.pids(line, said)))
        assert raising.pids(raising.NO_ROOM, said)
        assert not raising.pids(raising.OFF, said)


def check_removed(one: Bench, expected: list[object]) -> None:
    """Remove the spool folder while it is written to, and give it back later."""
    spool, said = one.new_folder("removed"), []

    def told(what: re.Pattern[str]) -> list[int]:
        said.append(one.said())
        return raising.pids(what, "".join(said))

    one.point_to(spool)
    with one.fresh("nothing"):
        assert one.ask() == expected[:2]
        raising.remove(spool)
        assert one.ask() == expected[:2]
        until(lambda: len(told(raising.NO_ROOM)) >= 4, what="processes have seen it")
        assert one.ask() == expected[:2]
    spool.mkdir()
    until(lambda: set(told(raising.ROOM_AGAIN)) == set(told(raising.NO_ROOM)), what="each goes on that had seen it")
    assert one.ask() == expected[:2]
    assert not told(raising.OFF)
    assert len(told(raising.NO_ROOM)) == len(set(told(raising.NO_ROOM)))
    assert list(spool.glob("*.kvt"))


def test_engines_that_start_without_tracing_answer_alike(deployments: Deployments, tmp_path: Path) -> None:
    """P starts with a spool folder that cannot be; on D, watching the connector fails from the beginning."""
    with bench(deployments, "push", tmp_path, "attach", prefill={"KVTRACE_SPOOL": "/proc/no-such-spool"}) as one:
        expected = one.ask(one.lab.engines[1].url, requests=8)
        assert one.ask(requests=8) == expected
        assert one.ask(requests=8, rate_qps=float("inf")) == expected
        logs = {engine.role.value: engine.log.read_text(errors="replace") for engine in one.lab.engines}
        raised = sorted(one.switch.raised()["attach"])

        without = raising.pids(raising.UNUSABLE, logs["prefill"])
        assert len(without) == len(set(without)) >= 2
        assert raising.pids(raising.OFF, logs["decode"]) == raised
        assert len(raised) >= 1
