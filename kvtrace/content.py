"""What counts as content in a streamed reply, and so what a first token is: for engines' servers and for the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DELTA_KEYS = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call")
"""Keys of a chat chunk's delta that carry content; `role` alone does not."""


def in_choices(event: Mapping[str, Any]) -> bool:
    """Return whether a chunk brings text, token ids, reasoning or (part of) a tool call in any of its choices."""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if choice.get("text") or choice.get("token_ids"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta.get(key) for key in DELTA_KEYS):
            return True
    return False
