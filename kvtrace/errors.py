"""What can go wrong, one base and one line each: a message names the thing, the cause and the next step."""

from __future__ import annotations


class KvtraceError(Exception):
    """Base of every error that kvtrace raises on purpose; its text is fit for a user."""


class UsageError(KvtraceError):
    """A command, an option or an environment variable asks for something impossible."""


class SpoolError(KvtraceError):
    """A spool file or folder cannot be read or written."""


class StoreError(KvtraceError):
    """A store is missing, foreign, corrupt, or of another schema."""


class DamageError(StoreError):
    """A store is a DuckDB file that is corrupt or cut short."""


class RequestError(KvtraceError):
    """A request id names no request, or more than one."""


class QueryError(KvtraceError):
    """The database refuses a query, or a file that holds one is wrong."""


class VersionError(KvtraceError):
    """The vLLM or NIXL found is outside the supported range."""


class LabError(KvtraceError):
    """The lab, or a program that kvtrace started, did not come up or went down."""


class SourceError(KvtraceError):
    """A file to import is not of its format, is cut short, or says what cannot be."""


class ExportError(KvtraceError):
    """An export cannot be written, sent, or made without a package that is missing."""


def is_text(text: str) -> bool:
    """Return whether it is text: the system's names and arguments may hold bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def in_one_line(message: str) -> str:
    """Return a message in which nothing can move a terminal's cursor or break the line."""
    flat = " ".join(part.strip() for part in message.split("\n"))
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in flat)
