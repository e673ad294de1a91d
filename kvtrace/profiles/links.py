"""Where the profiles of a run can be looked at: what the store knows of them, and addresses for a part of them.

A window begins an upload earlier than what it is about: a profile counts for the moment at which it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from kvtrace.profiler import APPLICATION, clean

if TYPE_CHECKING:
    from collections.abc import Mapping

PROFILE_TYPE = "process_cpu:cpu:nanoseconds:cpu:nanoseconds"
"""What Pyroscope calls them, though with kvtrace's settings the time is wall-clock time."""
EXPLORE_PATH = "/a/grafana-pyroscope-app/explore"
"""Grafana's app Profiles Drilldown, formerly Explore Profiles, below Grafana's root."""
EARLIER_MS = 10_000
_MS_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's profiles are, as its facts say: a server, a folder, or neither."""

    server: str = ""
    folder: str = ""
    grafana: str = ""
    application: str = APPLICATION

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> Place | None:
        """Return the place, None for a run without profiles or with ones whose place only its user knows."""
        folder, server = facts.get("profiles.dir", ""), facts.get("profiles.url", "")
        if facts.get("profiles") == "joined" or not (folder or server):
            return None
        application = facts.get("profiles.application", "") or APPLICATION
        return cls("" if folder else server.partition(",")[0], folder, facts.get("profiles.grafana", ""), application)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the profiles: whose they are, and when, unix ms."""

    name: str
    labels: Mapping[str, str]
    from_ms: int
    to_ms: int


def windows(request: Mapping[str, Any]) -> list[Window]:
    """Return the parts of the profiles that a request, a row of the table, can show in: P's and D's."""
    end_ns = max(request["end_ns"] or 0, request["first_token_ns"] or 0, request["start_ns"])
    span = request["start_ns"] // _MS_NS - EARLIER_MS, end_ns // _MS_NS + 1
    sides = (("prefill", request["prefill_engine"]), ("decode", request["decode_engine"]))
    return [Window(side, {"engine": clean(engine)}, *span) for side, engine in sides if engine]


def url(place: Place, window: Window) -> str:
    """Return the address that shows a part: in Grafana where the store knows it, else in Pyroscope; "" for a folder."""
    if place.grafana:
        return place.grafana.rstrip("/") + explore(place.application, window)
    if not place.server:
        return ""
    selector = ",".join(
        f'{name}="{_escaped(value)}"' for name, value in (("service_name", place.application), *window.labels.items())
    )
    query = {
        "query": f"{PROFILE_TYPE}{{{selector}}}",
        "from": window.from_ms // 1000,
        "until": -(-window.to_ms // 1000),
    }
    return f"{place.server.rstrip('/')}/?{urlencode(query, quote_via=quote)}"


def explore(application: str, window: Window) -> str:
    """Return the path below Grafana's root that shows a part in its app for profiles."""
    query = [
        ("explorationType", "flame-graph"),
        ("var-serviceName", application),
        ("var-profileMetricId", PROFILE_TYPE),
        ("from", str(window.from_ms)),
        ("to", str(window.to_ms)),
        *(("var-filters", f"{name}|=|{value}") for name, value in window.labels.items()),
    ]
    return f"{EXPLORE_PATH}?{urlencode(query, quote_via=quote)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
