"""From spool files to the store: follow, convert, commit, analyse, publish."""

from __future__ import annotations

from kvtrace.collect.observing import Observer
from kvtrace.collect.recorder import Recorder
from kvtrace.collect.stats import Stats

__all__ = ["Observer", "Recorder", "Stats"]
