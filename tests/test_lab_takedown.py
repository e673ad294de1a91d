"""What a lab does until nothing of it is in the list of processes."""

from __future__ import annotations

import subprocess
import sys
import time

from kvtrace.lab import takedown

LEADER = """
import os, time
child = os.fork()
if not child:
    os._exit(0)
print(child, flush=True)
time.sleep({late_s})
os.wait()
time.sleep(60)
"""


def with_zombie(late_s: float) -> tuple[subprocess.Popen[str], int]:
    """Start a group in which a process has ended, to be reaped `late_s` later; return its leader and its pid."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER.format(late_s=late_s)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    return leader, int(leader.stdout.readline())


def end(leader: subprocess.Popen[str]) -> None:
    leader.kill()
    leader.wait()
    assert leader.stdout is not None
    leader.stdout.close()


def members_of(leader: subprocess.Popen[str], zombie: int) -> takedown.Members:
    members = takedown.Members("no lab has this mark")
    members.add(leader.pid)
    deadline_s = time.monotonic() + 5
    while members.zombies() != [zombie] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert members.zombies() == [zombie]
    assert zombie not in members.alive()
    return members


def test_waits_until_ended_members_are_reaped() -> None:
    leader, zombie = with_zombie(late_s=0.5)
    try:
        members = members_of(leader, zombie)
        takedown.await_reaped(members, 10)
        assert members.zombies() == []
        assert members.alive() == [leader.pid]
    finally:
        end(leader)


def test_does_not_wait_for_ever_for_who_reaps_nobody() -> None:
    leader, zombie = with_zombie(late_s=60)
    try:
        members = members_of(leader, zombie)
        began_s = time.monotonic()
        takedown.await_reaped(members, 0.2)
        assert 0.2 <= time.monotonic() - began_s < 5
        assert members.zombies() == [zombie]
    finally:
        end(leader)
