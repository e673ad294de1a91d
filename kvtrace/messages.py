"""What kvtrace says of its own work, on stderr. Nobody has to hear it: where stderr is full or gone, work goes on."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from kvtrace.errors import in_one_line


def say(message: str) -> None:
    """Write one line under the program's name; nothing in the message can move the cursor or break the line."""
    write(f"kvtrace: {in_one_line(message)}\n")


def command_line(*words: str | Path) -> str:
    """Return a command of kvtrace as it can be pasted into a shell; a path that begins with a dash gets `./`.

    What no terminal shows stands in it as $'...', which bash, zsh and POSIX of 2024 read; all of it is printable.
    """
    shown = (f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words)
    return " ".join(["kvtrace", *map(quoted, shown)])


def quoted(word: str) -> str:
    """Return a word as a shell takes it for itself, bytes that are no text included; the result is printable."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = (
        f"\\{letter}" if letter in "\\'" else letter if letter.isprintable() else
        "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))
        for letter in word
    )  # fmt: skip
    return f"$'{''.join(escaped)}'"


def write(text: str) -> None:
    """Write a text as it is. After a failure everything else goes nowhere, the interpreter's last flush too."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- open as long as the program runs
