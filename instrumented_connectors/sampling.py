"""Which requests have their blocks checked: the same ones on P and D, which cannot ask each other."""

from __future__ import annotations

import hashlib
import os
import re

VARIABLE = "KVTRACE_VERIFY_KV"
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD = re.compile(r"^\d+_")
_WHOLE = 1 << 64


class Sampling:
    """Chooses a share of the requests by a hash of what both sides know of a request's id.

    P and D each put a random suffix of their own behind the id that both were sent, so it does not count.
    """

    __slots__ = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = min(max(rate, 0.0), 1.0)

    @classmethod
    def from_environment(cls) -> Sampling:
        """Return the sampling that KVTRACE_VERIFY_KV (0 to 1) asks for; none where it is unset or no number."""
        try:
            rate = float(os.environ.get(VARIABLE) or 0)
        except ValueError:
            rate = 0.0
        return cls(rate if rate == rate else 0.0)  # noqa: PLR0124 - false for NaN alone

    def takes(self, request_id: str) -> bool:
        """Return whether the request of this engine-side id is among the chosen."""
        shared = _RANDOM_SUFFIX.sub("", _CHILD.sub("", request_id))
        digest = hashlib.blake2b(shared.encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.rate * _WHOLE
