"""Undoing what a failed call did before it failed: every step is tried, and what is not undone is said.

Owns how that is said: noted at the error that is on its way, where whoever made the call finds it. Knows no driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from devipc.errors import DevIPCError

__all__ = ["note_left", "raise_first", "try_each", "undo", "what_is_left"]

_LEFT = "_devipc_left"


def undo(function: Callable[..., object], *args: object) -> None:
    """Call ``function(*args)`` in an ``except`` block, to undo a part of what failed.

    The error on its way is the cause, and is not hidden. When this fails too, something stays mapped or held until the
    process ends: that is noted at the cause, and trying again would leave more.
    """
    cause = sys.exception()
    try:
        function(*args)
    except Exception as failed:
        if cause is None:
            raise
        note_left(cause, failed)


def note_left(cause: BaseException, failed: Exception) -> None:
    """Note at ``cause`` that ``failed`` kept something of it from being undone."""
    left = (*_own(cause), failed, *_own(failed))
    if isinstance(cause, DevIPCError):
        cause.left, cause.retryable = left, False
    else:
        setattr(cause, _LEFT, left)
        cause.add_note(f"not undone: {failed}")


def try_each(steps: Iterable[Callable[[], object]]) -> None:
    """Take every step, whatever fails of them; raise the first failure, at which the others are noted."""
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            failures.append(error)
    raise_first(failures)


def raise_first(failures: Sequence[Exception]) -> None:
    """Raise the first of these, if there is any; the others are noted at it."""
    for other in failures[1:]:
        note_left(failures[0], other)
    if failures:
        raise failures[0]


def what_is_left(error: BaseException) -> tuple[Exception, ...]:
    """Return what kept ``error``, or one that it was made from, from being undone: each names what stays."""
    found: list[Exception] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        found += _own(at)
        at = at.__cause__ or at.__context__
    return tuple(found)


def _own(error: BaseException) -> tuple[Exception, ...]:
    return error.left if isinstance(error, DevIPCError) else getattr(error, _LEFT, ())
