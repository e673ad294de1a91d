"""What an engine does for the first time takes longest, so a lab's engines do it before they are measured.

Each engine serves a few requests by itself, with neither router nor hand-off: a prompt as long as those to come, then
several at once. A pair's first contact is not part of it: deployments pay for that too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from kvtrace.errors import LabError
from kvtrace.lab import model, workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrace.lab.engine import Engine

_OUTPUT_TOKENS = 3
_SHORT_TOKENS = 16
_AT_ONCE = 4
_SEED = -1  # none that a load is given: no prefix of these prompts is to be found in a cache


def serve(engines: Iterable[Engine], prompt_tokens: int) -> None:
    """Let every engine serve its first requests, all engines at once.

    Raises LabError as soon as one cannot, and leaves the others to their own end: that of the lab ends them.
    """
    engines = list(engines)
    longest = min(prompt_tokens, model.CONTEXT_TOKENS - _OUTPUT_TOKENS)
    loads = [{"requests": 1, "input_len": longest}, {"requests": _AT_ONCE, "input_len": min(_SHORT_TOKENS, longest)}]

    def one(engine: Engine) -> None:
        for load in loads:
            settings = {"rate_qps": float("inf"), "output_len": _OUTPUT_TOKENS, "seed": _SEED, **load}
            failed = [record for record in workload.run(engine.url, quiet=True, **settings).records if record.error]
            if failed:
                raise LabError(f"{engine.name} cannot serve its first requests: {failed[0].error} (see {engine.log})")

    pool = ThreadPoolExecutor(len(engines), "kvtrace-warm-up")
    try:
        for served in as_completed([pool.submit(one, engine) for engine in engines]):
            served.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an engine that hangs would keep an interrupt waiting too
