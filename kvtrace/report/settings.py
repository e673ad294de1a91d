"""In what two runs were set up differently, as far as their facts tell: versions, model, load, flags of engines."""

from __future__ import annotations

import json
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvtrace.redaction import SECRET, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Row = dict[str, Any]

FACTS = ("model", "vllm", "nixl", "kvtrace", "connector", "device", "tp_size", "verify_kv", "host", "hostname")
_LAB = "command."
_FOLLOWS_THE_MODE = frozenset(("connector", "mode"))
# What is another one in every run, or is said by the mode.
_OF_EACH_RUN = frozenset(
    (
        *("--port", "--host", "--middleware", "--mode", "--prefill", "--decode", "--port-file"),
        *("engine_id", "kv_connector", "kv_connector_module_path", "kv_role"),
        *("KVTRACE_SPOOL", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP"),
    )
)
_SWITCHED_OFF = "--no-"
_OF_SHELLS = ("-c", "-lc")
"""What a shell takes a whole script behind, which has the flags."""


def differing(run: Mapping[str, str], against: Mapping[str, str], *, same_mode: bool) -> list[Row]:
    """Return what differs between two runs' facts: `what`, and its value in either, "" where it is not told.

    What only one of them tells is left out. Between two modes the connector is another one by necessity.
    """
    told = [(name, run.get(name, ""), against.get(name, "")) for name in FACTS]
    told += _paired(_load(run), _load(against))
    told += _paired(_flags(run), _flags(against))
    return [
        {"what": name, "run": one, "against": other}
        for name, one, other in told
        if one and other and _shown(one) != _shown(other) and (same_mode or name not in _FOLLOWS_THE_MODE)
    ]


def tells_flags(facts: Mapping[str, str]) -> bool:
    """Return whether a run's facts hold the commands of its engines, and so how caches and batches were set."""
    return bool(_flags(facts))


def _paired(run: Mapping[str, str], against: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield each name with both values; a flag that only one of two commands has is "not set" in the other."""
    if run and against:
        for name in dict.fromkeys((*run, *against)):
            yield name, run.get(name, "not set"), against.get(name, "not set")


def _shown(value: str) -> str:
    """Return a path's last part, since folders differ from machine to machine, and any other value as it is.

    A model's name has a slash too, and whose model it is counts: only what begins as a path does is one.
    """
    return PurePath(value).name or value if value.startswith(("/", "./", "../", "~")) else value


def _load(facts: Mapping[str, str]) -> dict[str, str]:
    """Return what the lab's load was told, apart from what only draws other prompts."""
    try:
        load = json.loads(facts.get("workload", ""))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(load, dict):
        return {}
    return {f"load {name}": str(value) for name, value in load.items() if name not in ("seed", "client_id")}


def _flags(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the flags and variables of the engines' commands, by side where the lab started them."""
    commands = {name.removeprefix(_LAB): line for name, line in facts.items() if name.startswith(_LAB)}
    if not commands and "workload" not in facts and facts.get("command"):
        commands = {"command": facts["command"]}
    found: dict[str, dict[str, None]] = {}
    for name, line in sorted(commands.items()):
        side = name.rpartition("-")[0] or name
        for flag, value in _words(line):
            found.setdefault(f"{side} {flag}", {})[value] = None
    return {name: ", ".join(values) for name, values in found.items()}


def _words(line: str) -> Iterator[tuple[str, str]]:
    """Yield the variables and flags of a command with their values."""
    try:
        words = without_secrets(shlex.split(line))  # of a store that an older kvtrace made
    except ValueError:
        return
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in _OF_EACH_RUN or SECRET.search(name):
            continue
        if name in _OF_SHELLS and " " in _value(words, number):
            yield from _words(_value(words, number))
        elif name == "--kv-transfer-config":
            yield from _transfer(value or _value(words, number))
        elif name.startswith(_SWITCHED_OFF):
            yield "--" + name.removeprefix(_SWITCHED_OFF), "off"
        elif _is_flag(name):
            yield name, value if has_value else _value(words, number) or "on"
        elif has_value and name.isidentifier() and name.isupper():
            yield name, value


def _value(words: Sequence[str], number: int) -> str:
    """Return the word behind that one, "" if it is a flag itself, or ends them."""
    follows = words[number + 1] if number + 1 < len(words) else ""
    return "" if follows == "--" or _is_flag(follows) else follows


def _is_flag(word: str) -> bool:
    """Return whether the word is a flag, as `-tp` and `--block-size` are, and -1 is not."""
    return word.startswith("-") and word.lstrip("-")[:1].isalpha()


def _transfer(text: str) -> Iterator[tuple[str, str]]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        for name, value in config.items():
            if name not in _OF_EACH_RUN:
                yield name, value if isinstance(value, str) else json.dumps(value, sort_keys=True)
