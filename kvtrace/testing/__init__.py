"""Stores of any size for tests and benchmarks: seeded, so that the same fleet is the same events everywhere."""

from __future__ import annotations

from kvtrace.testing.fleet import Fleet, fill, processes
from kvtrace.testing.traffic import ODDITIES, batches

__all__ = ["ODDITIES", "Fleet", "batches", "fill", "processes"]
