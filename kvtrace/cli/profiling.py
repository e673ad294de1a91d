"""The options of `record` that profile what it records, by a Pyroscope server or into a folder of its own."""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from kvtrace import profile_server, profiler
from kvtrace.errors import ExportError, UsageError, is_text
from kvtrace.messages import say
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrace.profiles.receiver import Receiver

Server = Annotated[
    str | None,
    typer.Option("--profile", metavar="URL", help="Profile engines and router; the Pyroscope server to send it to."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--profile-dir", metavar="DIR", help="Profile engines and router, without a server: pprof files."),
]
Grafana = Annotated[
    str | None,
    typer.Option("--profile-grafana", metavar="URL", help="With --profile: the Grafana that shows that server."),
]

_LOOPBACK_UPLOAD_S = "1"


@dataclass(frozen=True, slots=True)
class Asked:
    """What `record` was asked for, as it was said."""

    server: str | None = None
    folder: Path | None = None
    grafana: str | None = None


class Profiling:
    """Profiles of one recording: the switch in the environment, and the receiver where there is no server."""

    def __init__(self, asked: Asked) -> None:
        """Check what was asked for. Raises UsageError where it cannot be."""
        self._asked = asked
        self._receiver: Receiver | None = None
        self._stack = ExitStack()
        self.facts: dict[str, str] = {}
        if asked.server is not None and asked.folder is not None:
            raise UsageError("--profile URL and --profile-dir DIR exclude each other: profiles go to one place")
        if asked.grafana is not None and asked.server is None:
            raise UsageError("--profile-grafana belongs to --profile URL")
        for url in (asked.server, asked.grafana):
            if url is not None:
                profile_server.check_url(url)
        if asked.folder is not None and not is_text(str(asked.folder.absolute())):
            raise UsageError(f"--profile-dir {asked.folder}: its path is no UTF-8, so no store can name it")

    def __enter__(self) -> Self:
        """Switch profiles on for everything that is started from here on."""
        try:
            if self._asked.server is not None:
                self._begin(self._asked.server)
            elif self._asked.folder is not None:
                self._begin_folder(self._asked.folder.absolute())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def _begin(self, url: str) -> None:
        if reason := profile_server.unreachable(url):
            say(f"{url} does not answer ({reason}): profiles are lost until it does, everything else is recorded")
        grafana = {} if self._asked.grafana is None else {"profiles.grafana": self._asked.grafana}
        self.facts = {"profiles.url": url, "profiles.application": profiler.APPLICATION, **grafana}
        self._switch_on(url)

    def _begin_folder(self, folder: Path) -> None:
        try:
            from kvtrace.profiles.receiver import Receiver
        except ImportError as error:
            message = f"--profile-dir needs a package that is missing ({error.name}): pip install 'kvtrace[profiles]'"
            raise ExportError(message) from error
        self._receiver = self._stack.enter_context(Receiver(folder))
        self.facts = {"profiles.dir": str(folder)}
        if profiler.UPLOAD_VARIABLE not in os.environ:
            self._set(profiler.UPLOAD_VARIABLE, _LOOPBACK_UPLOAD_S)
        if profile_server.has_proxy():
            for name in ("NO_PROXY", "no_proxy"):
                self._set(name, f"{os.environ.get(name, '')},127.0.0.1".strip(","))
        self._switch_on(self._receiver.url)

    def _switch_on(self, url: str) -> None:
        if importlib.util.find_spec("pyroscope") is None:
            say("pyroscope-io is not installed here, so nothing here is profiled: pip install 'kvtrace[profiles]'")
        self._set(profiler.VARIABLE, url)

    def _set(self, name: str, value: str) -> None:
        before = os.environ.get(name)
        os.environ[name] = value
        self._stack.callback(_restore, name, before)

    @property
    def url(self) -> str:
        """Return where processes are to send profiles, "" where nobody asked for any."""
        return self._receiver.url if self._receiver is not None else self._asked.server or ""

    def report(self) -> Iterator[str]:
        """Yield what is to be said once the recording has ended."""
        if self._receiver is None:
            return
        folder = self.facts["profiles.dir"]
        yield (
            f"kept {plural(self._receiver.kept, 'profile')} in {folder}"
            if self._receiver.kept
            else f"no profile arrived for {folder}: is pyroscope-io installed where engines run?"
        )
        if self._receiver.failure:
            yield f"profiles were refused: {self._receiver.failure}"


def _restore(name: str, before: str | None) -> None:
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before
