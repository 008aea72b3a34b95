"""A device whose every call is made inside something: so that whoever watches a process sees where it hangs.

Owns the wrapping of calls. It knows no backend, and not what they are made in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, cast

from devipc.deadline import made_in
from devipc.interfaces.backend import Device

__all__ = ["SUBMISSIONS", "inside"]

_PARTS = ("memory", "sync", "transfer", "word_writes", "word_waits", "events")
SUBMISSIONS = frozenset(
    {"copy", "copy_batch", "copy_strided", "is_capturing", "record", "wait", "wait_marker", "write"}
)
"""Names of the calls that put something on a stream, and of the question that goes before."""


def inside(
    device: Device, around: Callable[[], AbstractContextManager[object]], *, direct: Collection[str] = ()
) -> Device:
    """Return ``device`` with its calls made in what ``around`` returns, also those that a backend gives up by itself.

    Parameters
    ----------
    device : Device
        Stays the caller's.
    around : callable
        Returns what is entered by the thread that calls, for as long.
    direct : collection of str
        Names of calls that are made as they are: by threads that are watched anyway, and must lose no time.
    """
    return cast("Device", _Part(device, around, frozenset(direct)))


class _Part:
    """A device, or a part of one. Any thread."""

    def __init__(
        self, inner: object, around: Callable[[], AbstractContextManager[object]], direct: frozenset[str]
    ) -> None:
        self._inner = inner
        self._around = around
        self._direct = direct

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in _PARTS:
            return None if found is None else _Part(found, self._around, self._direct)
        if not callable(found):
            return found
        if name not in self._direct:
            found = _made_in(self._around, found)
        self.__dict__[name] = found  # for the next time
        return found


def _made_in(around: Callable[[], AbstractContextManager[object]], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **options: Any) -> Any:
        with made_in(around):
            return call(*args, **options)

    return run
