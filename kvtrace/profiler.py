"""Pyroscope in this process, where KVTRACE_PROFILE names a server: wall-clock samples under a few bounded labels.

Only the standard library until it is switched on; then `pyroscope-io` samples the process on a thread of its own. An
agent that runs already, since the user has configured one, is joined: its settings stay, kvtrace's labels are added.
Nothing here raises into its host: what fails is said once, and the process goes on without profiles.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvtrace.errors import in_one_line
from kvtrace.profile_server import check_url, unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    Label = Callable[[str, str], Any]

VARIABLE = "KVTRACE_PROFILE"
"""The Pyroscope server, http://HOST:PORT; unset: no profiles, and nothing of Pyroscope is imported."""
RATE_VARIABLE = "KVTRACE_PROFILE_RATE_HZ"
UPLOAD_VARIABLE = "KVTRACE_PROFILE_UPLOAD_S"
APPLICATION = "kvtrace"
"""Pyroscope's `service_name` of everything that kvtrace switches on."""
STAGE_LABEL = "kvtrace.stage"
THREAD_LABEL = "kvtrace.thread"
FORWARD = "forward"
STAGES: Mapping[str, str] = {
    FORWARD: "compute",
    "match": "coordination",
    "allocate": "coordination",
    "plan": "coordination",
    "take_in": "coordination",
    "finish": "coordination",
    "start_load": "coordination",
    "save": "coordination",
    "get_finished": "coordination",
    "handshake": "coordination",
    "push": "coordination",
    "prepare": "coordination",
    "poll": "coordination",
    "notify": "coordination",
    "read_notifications": "coordination",
    "post": "transfer",
    "sleep": "",
}
"""What a thread of a connector may be labelled as doing, and the class of that; the sender's sleep is of none."""

_RATE_HZ = 20  # a sample of one process of vLLM takes 1.4 ms of processor time on a slow machine
_UPLOAD_S = 10
_STOP_WAIT_S = 2.0
_TEXT_MOST = 128
_THREADS = {"nixl-push-writer": "writer"}
_log = logging.getLogger("kvtrace")


class Facts(Protocol):
    """The part of an emitter that says what is known of a process."""

    def fact(self, name: str, value: str) -> None:
        """Record one fact about this process."""


class Profiler:
    """The labels of this process's threads while it is profiled; every method may be called at any time."""

    def __init__(
        self, add: Callable[[str, str], Any], remove: Callable[[str, str], Any], shared: Mapping[str, str]
    ) -> None:
        """`shared` are labels that every thread gets with its first stage: those that the agent does not have."""
        self._add = add
        self._remove = remove
        self._shared = dict(shared)
        self._local = _Local()
        self._works = True

    def enter(self, stage: str, thread: str = "") -> str:
        """Label this thread with a stage in place of its present one, which is returned for `leave`."""
        local = self._local
        if not local.named:
            self._name(local, thread)
        before = local.stage
        local.stage = stage
        self._swap(before, stage)
        return before

    def leave(self, before: str) -> None:
        """Label this thread with what it was doing before, the forward if one has begun meanwhile."""
        local = self._local
        if before in {"", FORWARD}:
            before = local.base
        present, local.stage = local.stage, before
        self._swap(present, before)

    def forward_began(self) -> None:
        """Label this thread with the forward until `forward_ended`, but for the stages meanwhile."""
        local = self._local
        local.base = FORWARD
        if not local.stage:
            self.enter(FORWARD, FORWARD)

    def forward_ended(self) -> None:
        """Take the forward off this thread."""
        local = self._local
        local.base = ""
        if local.stage == FORWARD:
            self.leave("")

    def _name(self, local: _Local, thread: str) -> None:
        local.named = True
        found = thread or threading.current_thread().name
        self._call(self._add, THREAD_LABEL, _THREADS.get(found) or clean(re.sub(r"\d+", "N", found)))
        for name, value in self._shared.items():
            self._call(self._add, name, value)

    def _swap(self, old: str, new: str) -> None:
        if old != new:
            if old:
                self._call(self._remove, STAGE_LABEL, old)
            if new:
                self._call(self._add, STAGE_LABEL, new)

    def _call(self, call: Label, name: str, value: str) -> None:
        if not self._works:
            return
        try:
            call(name, value)
        except BaseException as error:  # a panic of Rust's is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._works = False
            _say_off(error)


class _Local(threading.local):
    """What is known of one thread: its present stage, the one below all others, whether it has its name."""

    stage = ""
    base = ""
    named = False


class _State:
    """What runs in this process; a forked child begins anew."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.profiler: Profiler | None = None
        self.labels: dict[str, str] = {}
        self.owns = False
        self.tried = False


_state = _State()


def start(labels: Mapping[str, str], facts: Facts) -> Profiler | None:
    """Switch profiles on in this process, or join an agent that runs; return None where they are off. Never raises.

    Labels without a value are left out. A second call returns what the first one did.
    """
    url = os.environ.get(VARIABLE, "")
    if not url:
        return None
    with _state.lock:
        if not _state.tried:
            _state.tried = True
            try:
                _begin(url, {name: clean(value) for name, value in labels.items() if value}, facts)
            except BaseException as error:  # a panic of Rust's is no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                _say_off(error)
                facts.fact("profiles", f"off: {type(error).__name__}: {error}"[:200])
        return _state.profiler


def _begin(url: str, labels: dict[str, str], facts: Facts) -> None:
    check_url(url)
    import pyroscope

    _state.labels = labels
    _state.owns = pyroscope.configure(
        application_name=APPLICATION,
        server_address=url,
        sample_rate=int(_number(RATE_VARIABLE, _RATE_HZ)),
        oncpu=False,  # a thread that waits is what this is about
        gil_only=False,  # and it has let go of the interpreter meanwhile
        tags=labels,
        tenant_id=os.environ.get("PYROSCOPE_TENANT_ID", ""),
        basic_auth_username=os.environ.get("PYROSCOPE_BASIC_AUTH_USER", ""),
        basic_auth_password=os.environ.get("PYROSCOPE_BASIC_AUTH_PASSWORD", ""),
        upload_interval=int(_number(UPLOAD_VARIABLE, _UPLOAD_S)),
    )
    _state.profiler = Profiler(pyroscope.add_thread_tag, pyroscope.remove_thread_tag, {} if _state.owns else labels)
    facts.fact("profiles", "on" if _state.owns else "joined")
    if not _state.owns:
        return
    facts.fact("profiles.url", url)
    facts.fact("profiles.application", APPLICATION)
    _end_with_process()
    threading.Thread(target=_warn_if_unreachable, args=(url,), daemon=True, name="kvtrace-profiles").start()


def stop() -> None:
    """Send what was sampled last and end the agent, if kvtrace began it; wait no longer than two seconds."""
    with _state.lock:
        owns, _state.owns = _state.owns, False
        _state.profiler, _state.tried = None, False
    if owns:
        import pyroscope

        # The agent waits half a minute for a server that does not answer; whoever ends shall not.
        ending = threading.Thread(target=pyroscope.shutdown, daemon=True, name="kvtrace-profiles")
        ending.start()
        ending.join(_STOP_WAIT_S)


def clean(value: str) -> str:
    """Return a label's value as every receiver takes it: printable text, bounded."""
    text = str(value)[:_TEXT_MOST].encode("utf-8", "replace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _number(variable: str, default: int) -> float:
    try:
        return max(float(os.environ.get(variable) or default), 1)
    except ValueError:
        _log.warning("kvtrace ignores %s=%r: not a number", variable, os.environ[variable])
        return default


def _end_with_process() -> None:
    """Let the last samples out at the end of the process: of a child of multiprocessing too, which skips atexit."""
    from multiprocessing import util

    atexit.register(stop)
    util.Finalize(None, stop, exitpriority=100)


def _warn_if_unreachable(url: str) -> None:
    if reason := unreachable(url):
        _log.warning(
            "kvtrace: profiles of process %d are lost until %s answers, serving goes on: %s", os.getpid(), url, reason
        )


def _say_off(error: BaseException) -> None:
    said = in_one_line(f"{type(error).__name__}: {error}")
    hint = "; pip install 'kvtrace[profiles]'" if isinstance(error, ModuleNotFoundError) else ""
    _log.warning("kvtrace: no profiles of process %d, serving goes on: %s%s", os.getpid(), said, hint)


def _after_fork_in_child() -> None:
    global _state  # noqa: PLW0603 - the parent's agent does not run here
    _state = _State()


os.register_at_fork(after_in_child=_after_fork_in_child)
