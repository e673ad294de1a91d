"""What a recorder has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """What a recorder has done so far. `lag_s` is how old the newest event was when it was committed.

    `messages` are what it had to say, of one kind the first few; `unsaid` counts the others by what they have in
    common, `kept_messages` all that went into the store. `skipped_files` are those that it cannot read or knows under
    another name.
    """

    events: int = 0
    requests: int = 0
    lost: int = 0
    processes: int = 0
    messages: list[str] = field(default_factory=list)
    unsaid: dict[str, int] = field(default_factory=dict)
    kept_messages: int = 0
    skipped_files: int = 0
    lag_s: float = 0.0
    published: int = 0
    publish_s: float = 0.0  # processor time of the last publication
    publishing_s: float = 0.0  # and of all of them, copies included
    analyze_s: float = 0.0
    removed_files: int = 0
    published_ns: int = 0
    failing: bool = False

    def was_published(self, cost_s: float, published_ns: int) -> None:
        """Count a snapshot that took so much processor time and was in place at that time (unix ns)."""
        self.published += 1
        self.publish_s, self.published_ns = cost_s, published_ns
        self.publishing_s += cost_s

    def facts(self) -> dict[str, str]:
        """Return what the run's facts should say of it."""
        return {
            "recorder.events": str(self.events),
            "recorder.lost_records": str(self.lost),
            "recorder.skipped_files": str(self.skipped_files),
            "recorder.lag_ms": str(round(self.lag_s * 1000)),
            "recorder.publication_ms": str(round(self.publish_s * 1000)),
            "recorder.analysis_ms": str(round(self.analyze_s * 1000)),
        }
