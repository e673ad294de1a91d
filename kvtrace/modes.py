"""How KV is handed over, as requests, engines, routers and queries call it: P writes, D reads, or D computes alone."""

from __future__ import annotations

PUSH, PULL, LOCAL, UNKNOWN = "push", "pull", "local", "unknown"
MODES = (PUSH, PULL, LOCAL, UNKNOWN)
