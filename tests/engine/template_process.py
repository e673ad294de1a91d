"""A process that has imported vLLM and forks the API servers that it is told to; run by `tests.engine.template`.

usage: python -P template_process.py FD: FD is a socket of packets. `{"start": WORDS, "env": {...}, "cwd": PATH}`, with
the log as a descriptor beside it, is answered with the new process's id; `{"poll": ID}` with its exit code, null while
it runs. Each answer is `[NUMBER, ANSWER]` with the request's "number". The end of the socket ends this process, and no
child of it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import warnings
from contextlib import suppress
from typing import Any

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
PACKET_BYTES = 1 << 20


def main(channel: socket.socket) -> None:
    """Serve requests to their end; return in each child too, once its server has ended."""
    own = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [entry for entry in sys.path if entry not in own]
    warnings.simplefilter("ignore")
    for name in MODULES:
        importlib.import_module(name)
    warnings.resetwarnings()
    del sys.modules[MODULES[0]]  # a few lines that a child runs as its main program
    # Tests patch what is imported after this, and each child is to be as its own environment has it.
    assert not {"kvtrace", "instrumented_connectors"} & sys.modules.keys()
    # It looks for its room once, beside the environment as it was, which in a child is another's.
    importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()  # what a child never writes to it shares
    while True:
        packet, logs, _, _ = socket.recv_fds(channel, PACKET_BYTES, 1)
        if not packet:
            return
        request = json.loads(packet)
        answer = None
        if "start" in request:
            assert len(os.listdir("/proc/self/task")) == 1  # a child would have but one thread, and all the locks
            answer = os.fork()
            if answer == 0:
                channel.close()
                become(request, *logs)
                return
            with suppress(OSError):
                os.setpgid(answer, answer)  # before anybody looks for its group, whoever of the two comes first
            os.close(*logs)
        else:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(request["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
        channel.send(json.dumps([request["number"], answer]).encode())


def become(request: dict[str, Any], log: int) -> None:
    """Turn into what Python would be with that command, environment, folder and output, and run its module."""
    os.setpgid(0, 0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    _, _, module, *arguments = request["start"]
    sys.path[:0] = [request["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = arguments
    sys.modules.pop("sitecustomize", None)
    importlib.invalidate_caches()
    importlib.import_module("sitecustomize")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
