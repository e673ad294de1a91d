"""What the log of a lab's server tells: how far its start has come, why it failed and what to do about it."""

from __future__ import annotations

# Lines of an engine's log, latest first, and what they tell of its start.
_MILESTONES = (
    ("Application startup complete", "answers its first health check"),
    ("Registering KV_Caches", "starts its HTTP server"),
    ("Initializing NIXL worker", "starts its NIXL agent"),
    ("Starting to load model", "loads the model"),
    ("Initializing a V1 LLM engine", "starts its worker"),
    ("non-default args", "starts its engine core"),
    ("", "imports vLLM"),
)
# What the end of a failed engine's log says, and what to do about it.
_REMEDIES = (
    ("Address already in use", "another server took a port meanwhile: start the lab again"),
    ("unrecognized arguments", "vLLM does not know an argument: correct --engine-arg"),
    ("Cannot allocate memory", "an engine needs about 3.3 GB: end other programs or start fewer engines"),
    ("Supported range", "install a supported vLLM, or set KVTRACE_ALLOW_UNTESTED=1"),
    ("No module named", "install what is missing: `kvtrace doctor` says how"),
)


def milestone(log: str) -> str:
    """Return what an engine with this log is doing while it starts, as the rest of a sentence about it."""
    return next(state for line, state in _MILESTONES if line in log)


def remedy(tail: str) -> str:
    """Return what to do about a start that failed with this end of its log, "" where that is not known."""
    return next((remedy for sign, remedy in _REMEDIES if sign in tail), "")
