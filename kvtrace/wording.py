"""Counts as people write them, wherever a sentence names one."""

from __future__ import annotations


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return the count with its noun: 1 request, 2 requests; `nouns` is what more than one is where no s makes it."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"
