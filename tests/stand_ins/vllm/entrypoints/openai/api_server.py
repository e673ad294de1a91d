"""A stand-in for vLLM's API server: answers health checks, and has a child, as engine cores are, that it ends with.

STAND_IN says what is wrong with it: `fail` ends while starting, `hang` never answers, `deaf` hears no SIGTERM.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_CHILD = """
import signal, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
shared = shared_memory.SharedMemory(create=True, size=4096)
print("child has", shared.name, flush=True)
time.sleep(600)
"""


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_known_args()[0].port
    behaviour = os.environ.get("STAND_IN", "")
    sys.stdout.write(f"non-default args: {sys.argv}\n")
    sys.stdout.flush()
    if behaviour == "fail":
        sys.exit("ValueError: No module named 'quantum'")
    # An environment of its own: setproctitle overwrites what /proc shows of a real engine core's.
    child = subprocess.Popen([sys.executable, "-c", _CHILD], env={"HOME": "/"})
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else lambda *_: (child.kill(), os._exit(0)))
    if behaviour == "hang":
        time.sleep(600)
    ThreadingHTTPServer(("127.0.0.1", port), _Health).serve_forever()


if __name__ == "__main__":
    _main()
