"""The observers attached to doubles of vLLM's parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from instrumented_connectors.agent import AgentSide
from instrumented_connectors.device_clock import DeviceClock
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.probe import Probe
from instrumented_connectors.scheduler_side import SchedulerSide
from instrumented_connectors.step_mark import StepMark
from instrumented_connectors.worker_side import WorkerSide
from tests import connector_doubles as doubles

REMOTE = "r-on-P"
FIRST_RUNNER = ("start_load_kv", "wait_for_save", "get_transfer_results")
SECOND_RUNNER = ("finish_forward", *FIRST_RUNNER)
"""The order in which either of vLLM's model runners calls the connector's worker hooks."""


def scheduler(memory: doubles.Memory, connector: doubles.Connector, producer: bool = False) -> doubles.Connector:
    SchedulerSide(memory, producer=producer).attach(connector)
    return connector


def worker(
    memory: doubles.Memory, connector: doubles.Connector, pulls: bool = True, device_clock: DeviceClock | None = None
) -> Holdings:
    holdings = Holdings(memory, rank=1, extension_ns=20)
    WorkerSide(memory, holdings, 1, pulls=pulls, device_clock=device_clock).attach(connector)
    return holdings


def agent(
    memory: doubles.Memory, holdings: Holdings | None = None, probe: Probe | None = None
) -> tuple[AgentSide, Any, doubles.Agent]:
    inner = doubles.Agent()
    side = AgentSide(memory, holdings or Holdings(memory, 1, 20), 1, probe)
    return side, side.attach(inner), inner


def from_p() -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_request_id": REMOTE}


def stepped(
    connector: doubles.Connector, step: int, order: tuple[str, ...], tokens: int = 5, late: bool = True,
    prompt: bool = True, **fields: Any,
) -> None:  # fmt: skip
    """Run one step through a worker's connector, its hooks in the given order."""
    bound = doubles.metadata(**fields)
    bound.kvtrace_step = StepMark((step, tokens, late, prompt and tokens > 0))
    connector.bind_connector_metadata(bound)
    for name in order:
        getattr(connector, name)(*(["context"] if name == "start_load_kv" else []))
    connector.clear_connector_metadata()


def read(
    proxy: Any,
    rows: tuple[tuple[int, int, int], ...] = ((0, 100, 0), (100, 100, 0), (200, 300, 0)),
    indices: tuple[int, ...] = (0, 2),
    operation: str = "READ",
) -> Any:
    side = proxy.prep_xfer_dlist("NIXL_INIT_AGENT", proxy.get_xfer_descs(np.array(rows), "DRAM"))
    other = proxy.prep_xfer_dlist("remote", proxy.get_xfer_descs(np.array(rows), "DRAM"))
    return proxy.make_prepped_xfer(operation, side, np.array(indices), other, np.array(indices), notif_msg=b"r-on-P:1")
