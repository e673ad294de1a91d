"""Commands without the secrets in them: a store is passed around, and no request is the slower for a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

SECRET = re.compile(r"(key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
"""Names of flags and variables whose values are secrets; `--max-num-batched-tokens` is none."""
HIDDEN = "***"
_NAMED = r"[\w-]*(?:key|token|secret|password|passwd|credentials?)"
_VALUE = r"'[^']*'|\"[^\"]*\"|[^\s'\"]+"
_GIVEN = re.compile(rf"((?<![\w-]){_NAMED}=|(?<![\w-])-{{1,2}}{_NAMED}\s+)(?:{_VALUE})", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the words of a command with `***` for each value of a flag or variable that is named like a secret.

    A word that is a script of several is read as a shell would print it; passwords in URLs go too.
    """
    found: list[str] = []
    for word in argv:
        before = found[-1] if found else ""
        if before.startswith("-") and "=" not in before and SECRET.search(before) and not word.startswith("-"):
            found.append(HIDDEN)
            continue
        name, has_value, value = word.partition("=")
        if has_value and value and " " not in name and SECRET.search(name):
            found.append(f"{name}={HIDDEN}")
            continue
        found.append(_IN_URL.sub(HIDDEN, _GIVEN.sub(rf"\g<1>{HIDDEN}", word) if " " in word else word))
    return found
