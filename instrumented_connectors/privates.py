"""Every private vLLM member that tracing touches, each with the reason why no public hook will do.

A release that lacks one of them loses the points that need it (the process says so in its fact
`missing`), and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtrace.modes import PULL, PUSH


@dataclass(frozen=True, slots=True)
class Private:
    """One private member of vLLM's NIXL connector worker: its name, the modes that have it, the reason."""

    name: str
    modes: tuple[str, ...]
    reason: str


NIXL_HANDSHAKE = Private(
    "_nixl_handshake", (PULL, PUSH), "Runs on an executor thread: no hook sees a handshake begin or end."
)
READ_BLOCKS = Private(
    "_read_blocks_for_req", (PULL,), "Says which request a READ belongs to: the agent only sees the other side's id."
)
START_PUSH = Private(
    "_do_start_push_kv",
    (PUSH,),
    "The moment P's sender thread has blocks and registration together; says which request a WRITE belongs to.",
)
WRITER_WAKE = Private("_push_writer_wake", (PUSH,), "The event that P's sender thread sleeps on while idle.")
WRITER_STOP = Private("_push_writer_stop", (PUSH,), "The event that P's sender thread sleeps on between self-polls.")
REGISTRATION_INBOX = Private("_reg_send_inbox", (PUSH,), "Registrations that wait for D's sender thread.")
FINISHED_INBOX = Private("_finished_blocks_inbox", (PUSH,), "Blocks that wait for P's sender thread to pick them up.")
DEFERRED_INBOX = Private("_deferred_push_inbox", (PUSH,), "Pushes that wait for P's sender thread after a handshake.")
UNMATCHED_BLOCKS = Private("_push_finished_blocks", (PUSH,), "Blocks whose registration P's sender thread waits for.")
PHYSICAL_BLOCKS = Private(
    "_physical_blocks_per_logical_kv_block", (), "How many of NIXL's blocks one of the scheduler's is; 1 where absent."
)
HAS_MAMBA = Private("_has_mamba", (), "Whether blocks hold states beside KV, which have descriptors of their own.")

CORE_MODULE, CORE_CLASS, CORE_INTAKE = "vllm.v1.engine.core", "EngineCore", "preprocess_add_request"
"""Runs on the thread that fills the core's queue: hooks see a request only when it is taken out, between steps."""

WORKER_MODULE, WORKER_CLASS, WORKER_RESULT = "vllm.v1.executor.multiproc_executor", "WorkerProc", "handle_output"
"""Where a worker hands over a step's result: no hook sees that it has sampled."""

EXECUTOR_CLASS, EXECUTOR_SAMPLES = "MultiprocExecutor", "sample_tokens"
"""How the core tells its workers to sample: until then a worker spins, and lacks no processor that it has a use for."""

PRIVATES: tuple[Private, ...] = (
    NIXL_HANDSHAKE,
    READ_BLOCKS,
    START_PUSH,
    WRITER_WAKE,
    WRITER_STOP,
    REGISTRATION_INBOX,
    FINISHED_INBOX,
    DEFERRED_INBOX,
    UNMATCHED_BLOCKS,
    PHYSICAL_BLOCKS,
    HAS_MAMBA,
)


def find(worker: Any, private: Private) -> Any:
    """Return the member, or None where this vLLM release has none."""
    return getattr(worker, private.name, None)


def missing(worker: Any, mode: str) -> list[str]:
    """Return the names of the members that this worker should have in its mode and has not."""
    return [private.name for private in PRIVATES if mode in private.modes and find(worker, private) is None]
