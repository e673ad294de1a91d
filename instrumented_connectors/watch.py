"""The one way in which tracing touches vLLM: a method is watched, never changed.

A watched method calls the original exactly once, with its own arguments, and passes its result or its
exception on. Whatever goes wrong in an observer turns tracing off in this process; serving goes on.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

now_ns = time.monotonic_ns


class Tracer(Protocol):
    """The part of kvtrace.emit's emitter that observers use."""

    enabled: bool

    def emit(
        self,
        code: int,
        request: str = "",
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
        ref: str = "",
        t_ns: int = 0,
    ) -> None:
        """Record one event."""

    def fact(self, name: str, value: str) -> None:
        """Record one fact about this process."""

    def disable(self, where: str, error: BaseException | str) -> None:
        """Turn tracing off in this process."""


def watch(
    target: Any,
    name: str,
    tracer: Tracer,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., None] | None = None,
    failed: Callable[..., None] | None = None,
) -> None:
    """Let observers see every call of `target.name`.

    `before` gets the arguments and returns a token; `after` gets the token, the result and the
    arguments; `failed` gets the token, the exception and the arguments. Where a release has no such
    method, the points that need it are lost and the process says so in a fact.
    """
    call = getattr(target, name, None)
    if call is None:
        tracer.fact(f"missing.{name}", _named(target))
        return
    where = f"{_named(target)}.{name}"

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not tracer.enabled:
            return call(*args, **kwargs)
        token = None
        if before is not None:
            try:
                token = before(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - serving comes first
                tracer.disable(where, error)
        if failed is None:
            result = call(*args, **kwargs)
        else:
            try:
                result = call(*args, **kwargs)
            except BaseException as raised:
                if tracer.enabled:
                    try:
                        failed(token, raised, *args, **kwargs)
                    except Exception as error:  # noqa: BLE001 - serving comes first
                        tracer.disable(where, error)
                raise
        if after is not None and tracer.enabled:
            try:
                after(token, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - serving comes first
                tracer.disable(where, error)
        return result

    setattr(target, name, watched)


def _named(target: Any) -> str:
    """Return the name of a class, or of an object's."""
    return str(getattr(target, "__name__", type(target).__name__))


class Forwarder:
    """Stands in for an object: every attribute is the object's own until it is watched here."""

    def __init__(self, target: Any) -> None:
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class Bounded(dict[str, Any]):
    """A dict that forgets its oldest entry rather than grow beyond a limit."""

    LIMIT = 65_536

    def __setitem__(self, key: str, value: Any) -> None:
        if len(self) >= self.LIMIT and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
