"""Commands without the secrets in them: a store is passed around, and no request is the slower for a key."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

_NAME = (
    r"(?:key|token|secret|password|passwd|passphrase|credentials?|authorization|api[-_]?keys|cookie"
    r"|bearer|(?<![a-z])(?:pass|pwd|pw|auth|sig))"
)
SECRET = re.compile(rf"{_NAME}$", re.IGNORECASE)
"""Names of flags and variables whose values are secrets; `--max-num-batched-tokens` is none."""
HIDDEN = "***"
_SEVERAL = re.compile(r"api[-_]?keys?$", re.IGNORECASE)
"""Flags whose values are as many words as follow, as of vLLM's --api-key."""
_HEADER = re.compile(rf"[\w-]*{_NAME}:", re.IGNORECASE)
_SCHEME = re.compile(r"(?<![^=:,])(?:basic|bearer)$", re.IGNORECASE)
_SPACE = re.compile(r"\s")
_BEFORE_SCRIPT = re.compile(r"-[a-z]*c")
_PIECE = re.compile(r"""\s+|(?:'[^']*(?:'|$)|"(?:\\.|[^"\\])*(?:"|\\?$)|[^\s'"])+""", re.DOTALL)
_GIVEN = re.compile(rf"""((?<![\w.-])[\w.-]*{_NAME}\\?["']?\]?[:=]\\?["']?)[^\s'"\\]+""", re.IGNORECASE)
_SHAPED = re.compile(
    r"(?<![\w-])(?:(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[a-z]-)[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
)
"""Tokens that are known by how they look, wherever they stand."""
_LOGIN = re.compile(r"(?:-u|--user|--proxy-user)")
_LOGGED_IN = re.compile(r"((?:-u(?!rl:)|--user=|--proxy-user=)[^:=/]*:)(?!//|\$).+", re.DOTALL)
"""A login in one word with its flag."""
_ASSIGNS = re.compile(r"[:+]?=")
_KEYED = re.compile(rf"""["'][\w.-]*{_NAME}["']:$""", re.IGNORECASE)
"""A key of a mapping in a script, whose value is the next word."""
_IN_URL = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")


def without_secrets(argv: Sequence[str], *, ends: str = "-") -> list[str]:
    """Return the words of a command with `***` for each value of a flag or variable that is named like a secret.

    Such values in scripts, headers and JSON go too, and who logs in by a URL. A word that begins with one of `ends` is
    no value of the flag before it.
    """
    found: list[str] = []
    values_left = 0.0
    before = ""
    for word in argv:
        name, has_value, _ = word.partition("=")
        if values_left and (word == "\\" or _ASSIGNS.fullmatch(word)):  # the value is on the next line, or behind
            found.append(word)
            continue
        if values_left and word[:1] not in ends:
            values_left -= 1
            found.append(HIDDEN)
            continue
        values_left = 0
        if _LOGIN.fullmatch(before) and ":" in word:
            found.append(f"{word.partition(':')[0]}:{HIDDEN}")
            before = word
            continue
        if login := _LOGGED_IN.fullmatch(word):
            found.append(f"{login[1]}{HIDDEN}")
            before = word
            continue
        if _is_assigned(before, word):
            found.append(word if _ASSIGNS.fullmatch(word) else f"={HIDDEN}")
            values_left = 1 if found[-1] == word else 0
            before = word
            continue
        if word.startswith("-") and not has_value and SECRET.search(name):
            values_left = math.inf if _SEVERAL.search(name) else 1
        elif _HEADER.fullmatch(word):
            values_left = math.inf
        elif _KEYED.search(word) or _SCHEME.search(word):
            values_left = 1
        try:
            # A script may begin with a variable, and goes on behind its value.
            found.append(_cleared(word) if _BEFORE_SCRIPT.fullmatch(before) else _cleared_value(name, word))
        except RecursionError:
            found.append(HIDDEN)
        before = word
    return found


def _is_assigned(name: str, word: str) -> bool:
    """Return whether a word gives a value to the secret that the one before it names, with spaces around the sign."""
    is_sign = (word.startswith("=") and word[1:2] != "=") or _ASSIGNS.fullmatch(word) is not None
    # What a shell compares, as in `[ "$key" = a ]`, is assigned nothing.
    return is_sign and "$" not in name and SECRET.search(name.rstrip("\"'])")) is not None


def _cleared_value(name: str, word: str) -> str:
    """Return a word that may be `name` with a value."""
    value = word[len(name) + 1 :]
    if not value or _SPACE.search(name):
        return _cleared(word)
    if SECRET.search(name.rstrip("+]\"'")):
        return f"{name}={HIDDEN}"
    return f"{name}={without_secrets([value])[0]}" if name.startswith("-") else _cleared(word)


def _cleared(word: str) -> str:
    """Return a word without the secrets inside it: a script, a header, JSON, a URL."""
    if word.startswith(("{", "[")) and (document := _document(word)) is not None:
        shown = _cleared_document(document)
        return word if shown == document else json.dumps(shown)
    pieces = _PIECE.findall(word)
    if len(pieces) > 1:
        words = iter(without_secrets([piece for piece in pieces if not piece.isspace()], ends="-&|;<>"))
        return "".join(piece if piece.isspace() else next(words) for piece in pieces)
    plain = _unquoted(word)
    if plain != word:
        (cleared,) = without_secrets([plain])
        return word if cleared == plain else shlex.quote(cleared)
    return _SHAPED.sub(HIDDEN, _IN_URL.sub(HIDDEN, _GIVEN.sub(rf"\g<1>{HIDDEN}", word)))


def _unquoted(word: str) -> str:
    """Return what a shell would make of one word of a script; a word that is none stays as it is."""
    try:
        words = shlex.split(word) if "'" in word or '"' in word else []
    except ValueError:
        return word
    return words[0] if len(words) == 1 else word


def _document(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return None


def _cleared_document(value: Any, *, is_secret: bool = False) -> Any:
    if isinstance(value, dict):
        of = value.get("name")  # as variables of a container are given: a name and a value
        is_secret = is_secret or (isinstance(of, str) and "value" in value and bool(SECRET.search(of)))
        return {
            name: _cleared_document(one, is_secret=(is_secret and name != "name") or bool(SECRET.search(name)))
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_cleared_document(one, is_secret=is_secret) for one in value]
    if isinstance(value, str):
        return HIDDEN if is_secret and value else _cleared(value)
    return value
