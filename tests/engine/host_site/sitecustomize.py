"""Lets engines on CPUs hand KV over through a host buffer, as vLLM does where NIXL cannot register a device's memory.

On the PYTHONPATH of a lab's engines, so that Python runs it before anything else. vLLM decides about a host buffer by
its platform; here its worker and its scheduler are told that they have one, and all that they do with it is vLLM's own.
A stand-in takes the place of the platform's copy between device and host, since the device is the host: it copies the
same blocks, from one tensor in memory to another. It sleeps first for as many ms as the file `copies.d2h` or
`copies.h2d` in `KVTRACE_FAULTS` says, and copies nothing while a file `copies.none` is there.
Nothing of kvtrace knows of this.
"""

from __future__ import annotations

import functools
import os
import runpy
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
CLASSES = {
    f"{_NIXL}.base_worker": "NixlBaseConnectorWorker",
    f"{_NIXL}.base_scheduler": "NixlBaseConnectorScheduler",
}


def _switch(name: str) -> Path:
    return Path(os.environ["KVTRACE_FAULTS"], name)


def copy(
    src_kv_caches: dict[str, Any], dst_kv_caches: dict[str, Any], src_block_ids: list[int], dst_block_ids: list[int],
    direction: str,
) -> None:  # fmt: skip
    """Copy blocks, row by row of each cache, as the platform's operation does between a device and the host."""
    name, began_s = f"copies.{direction}", time.monotonic()
    if _switch(name).exists():
        time.sleep(float(_switch(name).read_text()) / 1000)
        with _switch(f".{name}.fired").open("a") as mark:
            mark.write(f"{(time.monotonic() - began_s) * 1000}\n")
    if _switch("copies.none").exists():
        return
    for layer, source in src_kv_caches.items():
        dst_kv_caches[layer][dst_block_ids] = source[src_block_ids]


def _patch(module: ModuleType) -> None:
    owner = getattr(module, CLASSES[module.__name__])
    construct = owner.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.use_host_buffer = True

    owner.__init__ = constructed
    if hasattr(owner, "set_host_xfer_buffer_ops"):
        given = owner.set_host_xfer_buffer_ops

        @functools.wraps(given)
        def standing_in(self: Any, _operation: Any) -> None:
            kind, self.device_type = self.device_type, "another"  # on a device that is the CPU vLLM sets none
            given(self, copy)
            self.device_type = kind

        owner.set_host_xfer_buffer_ops = standing_in


sites = runpy.run_path(str(Path(__file__).parents[1] / "sites.py"))
sites["patch_on_import"](dict.fromkeys(CLASSES, _patch))
sites["run_next_of"](__file__)
