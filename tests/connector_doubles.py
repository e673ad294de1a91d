"""Doubles for the connectors' tests: a tracer that remembers, and the parts of vLLM that the observers meet."""

from __future__ import annotations

import queue
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvtrace import stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Emitted = namedtuple("Emitted", "stage request numbers ref t_ns")


class Memory:
    """A tracer that keeps what it is given."""

    def __init__(self) -> None:
        self.enabled = True
        self.events: list[Emitted] = []
        self.facts: dict[str, str] = {}
        self.disabled: list[tuple[str, str]] = []

    def emit(
        self, code: int, request: str = "", a: int = 0, b: int = 0, c: int = 0, d: int = 0, ref: str = "", t_ns: int = 0
    ) -> None:
        self.events.append(Emitted(stages.BY_CODE[code].name, request, (a, b, c, d), ref, t_ns))

    def fact(self, name: str, value: str) -> None:
        self.facts[name] = value

    def disable(self, where: str, error: object) -> None:
        self.enabled = False
        self.disabled.append((where, str(error)))

    @property
    def names(self) -> list[str]:
        return [event.stage for event in self.events]

    def of(self, stage: str) -> list[Emitted]:
        return [event for event in self.events if event.stage == stage]

    def forget(self) -> None:
        self.events.clear()


def request(name: str = "r", params: dict[str, Any] | None = None, prompt: int = 600) -> SimpleNamespace:
    """Return a request as vLLM's scheduler hands it to connectors."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        num_output_tokens=8,
        arrival_time=2.5,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def metadata(**fields: Any) -> SimpleNamespace:
    """Return connector metadata of a step in which nothing happens, but for the given fields."""
    empty = {
        "reqs_to_recv": {}, "reqs_to_send": {}, "scheduler_clock": 100.0, "reqs_in_batch": set(),
        "reqs_not_processed": set(), "push_registrations": {}, "push_finished_blocks": {},
    }  # fmt: skip
    return SimpleNamespace(**(empty | fields))


def meta(blocks: Any = ((1, 2, 3),), engine: str = "P", remote: str = "r-on-P") -> SimpleNamespace:
    """Return what a step's metadata says of one request to load."""
    return SimpleNamespace(local_block_ids=blocks, remote=SimpleNamespace(engine_id=engine, request_id=remote))


def results(sent: Iterable[str] = (), received: Iterable[str] = (), failed: Iterable[str] = ()) -> SimpleNamespace:
    """Return what a worker's connector reports at the end of a step."""
    return SimpleNamespace(
        finished_sending=set(sent), finished_recving=set(received) | set(failed), failed_recving=set(failed)
    )


def output(tokens: dict[str, int], sync: bool = False, preempted: set[str] | None = None) -> SimpleNamespace:
    """Return a scheduler output that schedules `tokens` (request id to count)."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        has_sync_kv_loads=sync,
        preempted_req_ids=preempted,
    )


class Connector:
    """A connector whose every hook counts its calls and returns what the test put there."""

    SCHEDULER = (
        "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
        "request_finished", "request_finished_all_groups", "update_connector_output", "get_kv_connector_stats",
    )  # fmt: skip
    WORKER = (
        "bind_connector_metadata", "finish_forward", "start_load_kv", "wait_for_save", "get_transfer_results",
        "clear_connector_metadata", "shutdown",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.returns: dict[str, Any] = {
            "get_num_new_matched_tokens": (0, False),
            "request_finished": (True, {}),
            "request_finished_all_groups": (True, {}),
            "get_transfer_results": results(),
        }
        for name in (*self.SCHEDULER, *self.WORKER):
            setattr(self, name, self._hook(name))

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(*_args: Any, **_kwargs: Any) -> Any:
            self.calls.append(name)
            value = self.returns.get(name)
            if isinstance(value, BaseException):
                raise value
            return value

        return hook


class Agent:
    """A NIXL agent: polls answer from a script, notifications come from a list."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.notifications: dict[str, list[bytes]] = {}
        self.sent: list[bytes] = []
        self.post: Any = "PROC"
        self.released: list[Any] = []
        self.name = "agent"

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        return SimpleNamespace(mem_type=mem_type, count=len(descs))

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, backends: Iterable[str] = ()
    ) -> Any:
        return SimpleNamespace(agent_name=agent_name)

    def release_dlist_handle(self, handle: Any) -> None:
        self.released.append(handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_side: Any,
        local_indices: Any,
        remote_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
    ) -> Any:
        if isinstance(self.post, OSError):
            raise self.post
        return SimpleNamespace(operation=operation)

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> Any:
        if isinstance(self.post, BaseException):
            raise self.post
        return self.post

    def check_xfer_state(self, handle: Any) -> Any:
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        return state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        raise RuntimeError("telemetry is off")

    def release_xfer_handle(self, handle: Any) -> None:
        self.released.append(handle)

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
        self.sent.append(notif_msg)

    def get_new_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        taken, self.notifications = self.notifications, {}
        return taken


class PushWorker:
    """The sender thread of vLLM's push worker, cut down to its sleeping, picking up and starting."""

    def __init__(self) -> None:
        self._push_writer_wake = threading.Event()
        self._push_writer_stop = threading.Event()
        self._reg_send_inbox: queue.Queue = queue.Queue()
        self._finished_blocks_inbox: queue.Queue = queue.Queue()
        self._deferred_push_inbox: queue.Queue = queue.Queue()
        self._push_finished_blocks: dict = {}
        self.registrations: dict = {}
        self.started: list[tuple[str, str]] = []
        self.rounds = 0
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._push_writer_stop.set()
        self._push_writer_wake.set()
        self._thread.join(timeout=60)

    def _do_start_push_kv(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        self.started.append((request_id, registration_data["request_id"]))

    def _loop(self) -> None:
        while not self._push_writer_stop.is_set():
            while True:
                try:
                    name, blocks = self._finished_blocks_inbox.get_nowait()
                except queue.Empty:
                    break
                self._do_start_push_kv(name, blocks, self.registrations[name])
            self.rounds += 1  # over: what comes from now on is for the next one
            self._push_writer_wake.wait()
            self._push_writer_wake.clear()


class Device:
    """A device whose events pass at times that the test sets; its clock runs 7 s behind the host's."""

    def __init__(self) -> None:
        self.host_ns = 1_000_000_000
        self.work_ends_ns = 0
        self.waited = False
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object = None) -> None:
                self.at_ns = device.host_ns + 20_000 if stream else max(device.work_ends_ns, device.host_ns)

            def query(self) -> bool:
                return device.now() >= self.at_ns

            def synchronize(self) -> None:
                device.waited = True

            def elapsed_time(self, other: Any) -> float:
                return (other.at_ns - self.at_ns) / 1e6

        self.Event = Event
        self.Stream = object

    def now(self) -> int:
        self.host_ns += 1_000
        return self.host_ns
